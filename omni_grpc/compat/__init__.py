"""The Python names of vLLM-Omni over this package: thin constructors, no second engine.

What cannot be done is refused by name, never passed over. Importing this loads no torch, and `Attention` and
`AttentionMetadata` do when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_grpc.compat.config import DiffusionCacheConfig, OmniDiffusionConfig
from omni_grpc.compat.omni import Omni
from omni_grpc.compat.parallel import DiffusionParallelConfig
from omni_grpc.compat.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams

if TYPE_CHECKING:
    from omni_grpc.compat.attention import Attention, AttentionMetadata

OmniDiffusion = Omni
"""What vLLM-Omni calls an Omni of a model that does nothing but diffusion; there are no others here."""

__all__ = [
    "Attention",
    "AttentionMetadata",
    "DiffusionCacheConfig",
    "DiffusionOutput",
    "DiffusionParallelConfig",
    "Omni",
    "OmniDiffusion",
    "OmniDiffusionConfig",
    "OmniDiffusionRequest",
    "OmniDiffusionSamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in ("Attention", "AttentionMetadata"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from omni_grpc.compat import attention

    return getattr(attention, name)
