"""The quant family: activation functions, and dynamic quantization of rows to 8 bits with a scale for each.

Shapes: T tokens, C channels. A row is values * scale, both of which depend on that row alone:
    scale = max |row| / L, values = round(row / scale), with L = 127 for int8 and 448 for float8_e4m3fn
so that the largest magnitude gets the largest value (symmetric, per token, dynamic: https://arxiv.org/abs/2208.07339,
section 2.1, and https://arxiv.org/abs/2209.05433). A row of zeros has scale 0. A row with a value that is not finite
reads as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, op

LARGEST: Mapping[torch.dtype, float] = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.int8: 127.0})
"""The largest value of each dtype."""


def is_int8(dtype: torch.dtype) -> bool:
    """The flag of the quantizing ops for a dtype. Raises ValueError where it is neither of the two that they write."""
    if dtype not in LARGEST:
        raise ValueError(f"rows are quantized to torch.float8_e4m3fn or torch.int8, not to {dtype}")
    return dtype == torch.int8


def quantize_rows(x: Tensor, dtype: torch.dtype, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, C] -> values [T, C] in `dtype`, torch.float8_e4m3fn or torch.int8, and scales float32 [T].

    index: int32 [S], which rows of x to take, in this order; the values are [S, C] then. The CUDA kernel does not check
    whether x has such rows.

    Raises ValueError for another dtype and RuntimeError where x has other dimensions. Kernels serve float32 and
    bfloat16, the reference everything else.
    """
    return quantize_rows_op(x, index, is_int8(dtype))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation (https://arxiv.org/abs/1606.08415, section 2): [T, C] -> [T, C] of x's dtype.

    For other dtypes, and for tensors that are not 2-D, this is torch's GELU.
    """
    return gelu_tanh_op.overload(x) if _has_kernel(x) else F.gelu(x, approximate="tanh")


def _has_kernel(x: Tensor) -> bool:
    return x.dtype in KERNEL_DTYPES and x.dim() == 2


@op(kernel_if=_has_kernel, of=("x",))
def quantize_rows_op(x: Tensor, index: Tensor | None, int8: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of x [T, C], to torch.int8 or else to torch.float8_e4m3fn."""
    _check("quantize_rows", x)
    if index is None:
        return quantize_reference(_wide(x), int8)
    if index.dtype != torch.int32 or index.dim() != 1 or (index.numel() > 1 and index.stride(0) != 1):
        raise RuntimeError("quantize_rows: index must be int32 [S] and contiguous")
    if index.device != x.device:
        raise RuntimeError("quantize_rows: x and index must be on one device")
    return quantize_reference(_wide(x.index_select(0, index)), int8)


@op()
def gelu_tanh_op(x: Tensor) -> Tensor:
    """`gelu_tanh` of x [T, C], for the dtypes that kernels serve."""
    _check("gelu_tanh", x)
    return F.gelu(x, approximate="tanh").contiguous()


@op(kernel_if=_has_kernel, of=("x",))
def silu_mul(x: Tensor, up: Tensor) -> Tensor:
    """silu(x) * up, the inside of SwiGLU (https://arxiv.org/abs/2002.05202, eq. 6): [T, C], [T, C] -> [T, C].

    x, up: one dtype; both may be views with a row stride, so the halves of one projection [T, 2C] serve, in either
    order. Computed in float32 (float64 for float64). Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    _check("silu_mul", x, up)
    return (F.silu(_wide(x)) * up).to(x.dtype).contiguous()


@op(kernel_if=_has_kernel, of=("x",))
def concat_gelu_tanh(x: Tensor, y: Tensor) -> Tensor:
    """x and `gelu_tanh(y)` concatenated: [T, C], [T, D] -> [T, C + D], all of one dtype. The input of the last
    projection of a parallel block (https://arxiv.org/abs/2302.05442, section 2.1): attention's heads, then the hidden
    layer of the feed-forward. Both may be views with a row stride. Raises RuntimeError where rows, dtypes or devices
    disagree.
    """
    _check_concat("concat_gelu_tanh", x, y)
    return torch.cat([x, F.gelu(y, approximate="tanh")], 1)


@op(kernel_if=_has_kernel, of=("x",))
def gelu_tanh_quantize_rows(x: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `gelu_tanh(x)` before it is rounded: values [T, C] in torch.int8 or else in
    torch.float8_e4m3fn, and scales float32 [T].
    """
    _check("gelu_tanh_quantize_rows", x)
    return quantize_reference(F.gelu(_wide(x), approximate="tanh"), int8)


@op(kernel_if=_has_kernel, of=("x",))
def silu_mul_quantize_rows(x: Tensor, up: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `silu_mul(x, up)` before it is rounded: values [T, C] and scales float32 [T]."""
    _check("silu_mul_quantize_rows", x, up)
    return quantize_reference(F.silu(_wide(x)) * up, int8)


@op(kernel_if=_has_kernel, of=("x",))
def concat_gelu_tanh_quantize_rows(x: Tensor, y: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `concat_gelu_tanh(x, y)` before it is rounded: values [T, C + D] and scales float32 [T]."""
    _check_concat("concat_gelu_tanh_quantize_rows", x, y)
    return quantize_reference(torch.cat([_wide(x), F.gelu(_wide(y), approximate="tanh")], 1), int8)


def quantize_reference(x: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    """The values [T, C] and scales float32 [T] of rows x [T, C] in float32 or wider."""
    dtype = torch.int8 if int8 else torch.float8_e4m3fn
    return _to_peak(x, row_peaks(x)[:, None], dtype)


def row_peaks(x: Tensor) -> Tensor:
    """The largest magnitude of each row of x [T, C]: float32 [T] for dtypes up to float32, else as wide."""
    return _wide(x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x)))


def quantize_rows_to(x: Tensor, dtype: torch.dtype, peak: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of some channels of rows, x [T, C], whose largest magnitudes over all channels are `peak` [T]."""
    return _to_peak(_wide(x), peak[:, None], torch.int8 if is_int8(dtype) else dtype)


def _to_peak(x: Tensor, peak: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = LARGEST[dtype]
    scale = peak.float() / largest
    values = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-largest, largest)
    if dtype == torch.int8:
        # what a NaN becomes as an integer is undefined; the scale says that the row is NaN
        values = values.round().nan_to_num(0.0)
    return values.to(dtype).contiguous(), scale.squeeze(1)


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


def _check_concat(op: str, x: Tensor, y: Tensor) -> None:
    _check(op, x)
    if y.dim() != 2 or y.shape[0] != x.shape[0]:
        raise RuntimeError(f"{op}: y must have as many rows as x")
    _check_alike(op, x, y, "y")


def _check_alike(op: str, x: Tensor, other: Tensor, name: str) -> None:
    if other.dtype != x.dtype:
        raise RuntimeError(f"{op}: x and {name} must have the same dtype, got {x.dtype} and {other.dtype}")
    if other.device != x.device:
        raise RuntimeError(f"{op}: x and {name} must be on one device")
