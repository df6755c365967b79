"""From a VAE's pixels to images."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_grpc.errors import InternalError

Image = NDArray[np.uint8]
"""height x width x 3, RGB."""


def to_uint8(pixels: Tensor) -> list[Image]:
    """Pixels [N, 3, height, width] in -1..1 -> N images. What lies outside is clipped.

    Raises InternalError for values that are not finite: a picture of them would look like a result.
    """
    if not torch.isfinite(pixels).all():
        raise InternalError("the decoded image has values that are not finite", reason="NOT_FINITE")
    unit = (pixels * 0.5 + 0.5).clamp(0, 1).float()
    return list((unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy())
