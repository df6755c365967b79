"""The norm family: normalisation fused with the elementwise work around it.

Shapes: T packed tokens, C channels, M modulation vectors. A token finds its vector by `index`, so that rows of
different requests, timesteps and guidance branches share one call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.library import declare

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16})


def norm_modulate(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without affine over the channels, then the token's modulation: `norm(x) * (1 + scale) + shift`.

    x: [T, C]. scale, shift: [M, C], one dtype, which may differ from x's; views with a row stride are welcome.
    index: int32 [T], the row of scale and shift for each token; with M == 1 its values are not read.
    Returns a new contiguous [T, C] in x's dtype, computed in float32 (float64 for float64).
    Raises RuntimeError where shapes, dtypes or devices disagree. A kernel serves float32 and bfloat16, the reference
    everything else. This is adaLN of DiT (https://arxiv.org/abs/2212.09748, section 3.2).
    """
    if x.dtype in KERNEL_DTYPES and scale.dtype in KERNEL_DTYPES:
        out: Tensor = _norm_modulate(x, scale, shift, index, eps)
        return out
    return norm_modulate_reference(x, scale, shift, index, eps)


def norm_modulate_reference(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float = 1e-6) -> Tensor:
    """The definition of `norm_modulate`: what its kernels are compared with."""
    _check(x, scale, shift, index)
    math = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(x.to(math), (x.shape[1],), eps=eps)
    if scale.shape[0] != 1:
        scale, shift = scale.index_select(0, index), shift.index_select(0, index)
    return (normed * (1 + scale.to(math)) + shift.to(math)).to(x.dtype).contiguous()


def _norm_modulate_fake(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float = 1e-6) -> Tensor:
    _check(x, scale, shift, index)
    return x.new_empty(x.shape)


def _check(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor) -> None:
    torch._check(x.dim() == 2, lambda: f"norm_modulate: x must be [T, C], got {x.dim()} dimensions")
    torch._check(
        scale.dim() == 2 and shift.dim() == 2,
        lambda: f"norm_modulate: scale and shift must be [M, C], got {scale.dim()} and {shift.dim()} dimensions",
    )
    torch._check(
        scale.shape[1] == x.shape[1] and shift.shape[1] == x.shape[1],
        lambda: f"norm_modulate: x has {x.shape[1]} channels, scale {scale.shape[1]} and shift {shift.shape[1]}",
    )
    torch._check(
        scale.shape[0] == shift.shape[0],
        lambda: f"norm_modulate: scale has {scale.shape[0]} rows and shift {shift.shape[0]}",
    )
    torch._check(
        scale.dtype == shift.dtype,
        lambda: f"norm_modulate: scale is {scale.dtype} and shift {shift.dtype}; they must be alike",
    )
    torch._check(
        index.dtype == torch.int32 and index.dim() == 1,
        lambda: f"norm_modulate: index must be int32 [T], got {index.dtype} with {index.dim()} dimensions",
    )
    torch._check(
        index.shape[0] == x.shape[0],
        lambda: f"norm_modulate: index has {index.shape[0]} entries for {x.shape[0]} tokens",
    )
    torch._check(
        x.device == scale.device == shift.device == index.device,
        lambda: "norm_modulate: x, scale, shift and index must be on one device",
    )


_norm_modulate = declare(
    "norm_modulate(Tensor x, Tensor scale, Tensor shift, Tensor index, float eps=1e-6) -> Tensor",
    reference=norm_modulate_reference,
    fake=_norm_modulate_fake,
)
