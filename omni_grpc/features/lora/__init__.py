"""LoRA (https://arxiv.org/abs/2106.09685) and its kin: y = W x + the sum of scale * change(x), adapters and scales per
row.
"""

from __future__ import annotations

from omni_grpc.features.lora.adapters import Adapters
from omni_grpc.features.lora.attach import apply
from omni_grpc.features.lora.layer import LoraLinear

__all__ = ["Adapters", "LoraLinear", "apply"]
