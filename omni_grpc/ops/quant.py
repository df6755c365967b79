"""The quant family: activations, and rows in 8 bits with a scale for each.

Shapes: T tokens, C channels. A row's codes and scale depend on that row alone. What a row is, is codes * scale:
    scale = max |row| / L, codes = round(row / scale), with L = 127 for int8 and 448 for float8_e4m3fn
so that the largest magnitude has the largest code (symmetric, per token, dynamic: https://arxiv.org/abs/2208.07339,
section 2.1, and https://arxiv.org/abs/2209.05433). A row of zeros has scale 0. A row with a value that is not finite
reads as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.library import declare

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16})
LARGEST: Mapping[torch.dtype, float] = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.int8: 127.0})
"""The largest code of each dtype."""


def is_int8(dtype: torch.dtype) -> bool:
    """What the ops are told of the dtype of the codes. Raises ValueError where it is none that they write."""
    if dtype not in LARGEST:
        raise ValueError(f"rows are quantised to torch.float8_e4m3fn or torch.int8, not to {dtype}")
    return dtype == torch.int8


def quantize_rows(x: Tensor, dtype: torch.dtype, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, C] -> codes [T, C] in `dtype`, torch.float8_e4m3fn or torch.int8, and scales float32 [T].

    index: int32 [S], which rows of x to take, in this order; codes are [S, C] then. A kernel on CUDA does not look
    whether x has such rows.

    Raises ValueError for another dtype and RuntimeError where x has other dimensions. Kernels serve float32 and
    bfloat16, the reference everything else.
    """
    call = _quantize_rows if _served(x) else quantize_rows_reference
    codes, scales = call(x, index, is_int8(dtype))
    return codes, scales


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation (https://arxiv.org/abs/1606.08415, section 2): [T, C] -> [T, C] of x's dtype.

    Of other dtypes and of any other number of dimensions it is torch's.
    """
    out: Tensor = _gelu_tanh(x) if _served(x) else F.gelu(x, approximate="tanh")
    return out


def silu_mul(x: Tensor, up: Tensor) -> Tensor:
    """silu(x) * up, the inside of SwiGLU (https://arxiv.org/abs/2002.05202, eq. 6): [T, C], [T, C] -> [T, C].

    x, up: one dtype; both may be views with a row stride, so that one product [T, 2C] serves in either order: its
    halves. Computed in float32 (float64 for float64). Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    out: Tensor = (_silu_mul if _served(x) else silu_mul_reference)(x, up)
    return out


def beside_gelu_tanh(x: Tensor, y: Tensor) -> Tensor:
    """x and `gelu_tanh(y)` side by side: [T, C], [T, D] -> [T, C + D], all of one dtype. What the last projection of a
    parallel block reads (https://arxiv.org/abs/2302.05442, section 2.1): an attention's heads and the inside of a
    feed-forward. Both may be views with a row stride. Raises RuntimeError where rows, dtypes or devices disagree.
    """
    out: Tensor = (_beside_gelu_tanh if _served(x) else beside_gelu_tanh_reference)(x, y)
    return out


def gelu_tanh_quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `gelu_tanh(x)` before it is rounded: codes [T, C] and scales float32 [T]."""
    call = _gelu_tanh_quantize_rows if _served(x) else gelu_tanh_quantize_rows_reference
    codes, scales = call(x, is_int8(dtype))
    return codes, scales


def silu_mul_quantize_rows(x: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `silu_mul(x, up)` before it is rounded: codes [T, C] and scales float32 [T]."""
    call = _silu_mul_quantize_rows if _served(x) else silu_mul_quantize_rows_reference
    codes, scales = call(x, up, is_int8(dtype))
    return codes, scales


def beside_gelu_tanh_quantize_rows(x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `beside_gelu_tanh(x, y)` before it is rounded: codes [T, C + D] and scales float32 [T]."""
    call = _beside_gelu_tanh_quantize_rows if _served(x) else beside_gelu_tanh_quantize_rows_reference
    codes, scales = call(x, y, is_int8(dtype))
    return codes, scales


def _served(x: Tensor) -> bool:
    """Whether kernels serve the tensor."""
    return x.dtype in KERNEL_DTYPES and x.dim() == 2


# --- the definitions: what the kernels are compared with --------------------------------------------------------------


def quantize_reference(x: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows in float32 or wider."""
    dtype = torch.int8 if int8 else torch.float8_e4m3fn
    largest = LARGEST[dtype]
    peak = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(len(x), 1)
    scale = peak.float() / largest
    codes = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-largest, largest)
    if int8:
        # what a NaN becomes as an integer is left open; the scale says that the row is none
        codes = codes.round().nan_to_num(0.0)
    return codes.to(dtype).contiguous(), scale.squeeze(1)


def quantize_rows_reference(x: Tensor, index: Tensor | None, int8: bool) -> tuple[Tensor, Tensor]:
    _check("quantize_rows", x)
    if index is None:
        return quantize_reference(_wide(x), int8)
    if index.dtype != torch.int32 or index.dim() != 1 or (index.numel() > 1 and index.stride(0) != 1):
        raise RuntimeError("quantize_rows: index must be int32 [S], its entries side by side")
    if index.device != x.device:
        raise RuntimeError("quantize_rows: x and index must be on one device")
    return quantize_reference(_wide(x.index_select(0, index)), int8)


def gelu_tanh_reference(x: Tensor) -> Tensor:
    _check("gelu_tanh", x)
    return F.gelu(x, approximate="tanh").contiguous()


def silu_mul_reference(x: Tensor, up: Tensor) -> Tensor:
    _check("silu_mul", x, up)
    return (F.silu(_wide(x)) * up).to(x.dtype).contiguous()


def beside_gelu_tanh_reference(x: Tensor, y: Tensor) -> Tensor:
    _check_beside("beside_gelu_tanh", x, y)
    return torch.cat([x, F.gelu(y, approximate="tanh")], 1)


def gelu_tanh_quantize_rows_reference(x: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    _check("gelu_tanh_quantize_rows", x)
    return quantize_reference(F.gelu(_wide(x), approximate="tanh"), int8)


def silu_mul_quantize_rows_reference(x: Tensor, up: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    _check("silu_mul_quantize_rows", x, up)
    return quantize_reference(F.silu(_wide(x)) * up, int8)


def beside_gelu_tanh_quantize_rows_reference(x: Tensor, y: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    _check_beside("beside_gelu_tanh_quantize_rows", x, y)
    return quantize_reference(torch.cat([_wide(x), F.gelu(_wide(y), approximate="tanh")], 1), int8)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(op: str, x: Tensor, up: Tensor | None = None) -> None:
    """With plain raises: torch.compile goes through references where they are called, and takes no torch._check whose
    words tell of tensors.
    """
    if x.dim() != 2:
        raise RuntimeError(f"{op}: x must be [T, C], got {x.dim()} dimensions")
    if up is None:
        return
    if up.shape != x.shape:
        raise RuntimeError(f"{op}: up must have the shape of x")
    _check_alike(op, x, up, "up")


def _check_beside(op: str, x: Tensor, y: Tensor) -> None:
    _check(op, x)
    if y.dim() != 2 or y.shape[0] != x.shape[0]:
        raise RuntimeError(f"{op}: y must have as many rows as x")
    _check_alike(op, x, y, "y")


def _check_alike(op: str, x: Tensor, other: Tensor, name: str) -> None:
    if other.dtype != x.dtype:
        raise RuntimeError(f"{op}: x is {x.dtype} and {name} {other.dtype}; they must be alike")
    if other.device != x.device:
        raise RuntimeError(f"{op}: x and {name} must be on one device")


# The references give the shapes and dtypes without data too.
_quantize_rows = declare(
    "quantize_rows(Tensor x, Tensor? index, bool int8) -> (Tensor, Tensor)",
    reference=quantize_rows_reference,
    fake=quantize_rows_reference,
)
_gelu_tanh = declare("gelu_tanh(Tensor x) -> Tensor", reference=gelu_tanh_reference, fake=gelu_tanh_reference)
_silu_mul = declare("silu_mul(Tensor x, Tensor up) -> Tensor", reference=silu_mul_reference, fake=silu_mul_reference)
_beside_gelu_tanh = declare(
    "beside_gelu_tanh(Tensor x, Tensor y) -> Tensor",
    reference=beside_gelu_tanh_reference,
    fake=beside_gelu_tanh_reference,
)
_gelu_tanh_quantize_rows = declare(
    "gelu_tanh_quantize_rows(Tensor x, bool int8) -> (Tensor, Tensor)",
    reference=gelu_tanh_quantize_rows_reference,
    fake=gelu_tanh_quantize_rows_reference,
)
_silu_mul_quantize_rows = declare(
    "silu_mul_quantize_rows(Tensor x, Tensor up, bool int8) -> (Tensor, Tensor)",
    reference=silu_mul_quantize_rows_reference,
    fake=silu_mul_quantize_rows_reference,
)
_beside_gelu_tanh_quantize_rows = declare(
    "beside_gelu_tanh_quantize_rows(Tensor x, Tensor y, bool int8) -> (Tensor, Tensor)",
    reference=beside_gelu_tanh_quantize_rows_reference,
    fake=beside_gelu_tanh_quantize_rows_reference,
)
