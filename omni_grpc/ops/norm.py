"""The norm family: normalization fused with the elementwise work around it.

Shapes: T packed tokens, C channels, M modulation vectors. A token finds its vector by `index`, so that rows of
different requests, timesteps and guidance branches share one call.

Every op is one half, or both, of
    sum = x + gate * y                                   y may be RMS-normed first, with `y_weight`
    out = norm(sum) * weight + bias, then * (base + scale) + shift
where an operand that is None changes nothing. Everything is computed in float32 (float64 for float64); `sum` is rounded
to x's dtype before it is normed, so that fused and separate calls agree, and `out` at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, op
from omni_grpc.ops.quant import quantize_reference

TABLES = ("gate", "scale", "shift")


def _one_kernel_dtype(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether kernels serve these dtypes: the modulation and the norm's own vectors share one, whatever x's is."""
    first = None
    for parameter in parameters:
        if parameter is None:
            continue
        first = first or parameter.dtype
        if parameter.dtype != first:
            return False
    return x.dtype in KERNEL_DTYPES and (first is None or first in KERNEL_DTYPES)


@op(kernel_if=_one_kernel_dtype, of=("x", "scale", "shift", "weight", "bias"))
def norm_modulate(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
) -> Tensor:
    """LayerNorm over the channels, then the token's modulation: `norm(x) * weight + bias`, `* (base + scale) + shift`.

    x: [T, C]. scale, shift: [M, C], one dtype, which may differ from x's; views with a row stride are welcome.
    index: int32 [T], the row of scale and shift for each token. With M == 1 its values are not read; it may be None.
    weight, bias: [C], the norm's own. rms: RMSNorm (https://arxiv.org/abs/1910.07467) instead. base: 1 where the scale
    is what is added to 1, 0 where it is the factor itself.
    Returns a new contiguous [T, C] in x's dtype.
    Raises RuntimeError where shapes, dtypes or devices disagree. A kernel serves float32 and bfloat16, the reference
    everything else. This is adaLN of DiT (https://arxiv.org/abs/2212.09748, section 3.2).
    """
    _check("norm_modulate", x, index, scale=scale, shift=shift, weight=weight, bias=bias)
    return _normed(x, scale, shift, index, eps, weight, bias, rms, base).to(x.dtype).contiguous()


@op(kernel_if=_one_kernel_dtype, of=("x", "scale", "shift", "weight", "bias"))
def norm_modulate_quantize(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
    *,
    int8: bool,
) -> tuple[Tensor, Tensor]:
    """`norm_modulate`, then `quantize_rows` of the result before it is rounded: values [T, C] in torch.int8 or else in
    torch.float8_e4m3fn, and scales float32 [T].
    """
    _check("norm_modulate_quantize", x, index, scale=scale, shift=shift, weight=weight, bias=bias)
    return quantize_reference(_normed(x, scale, shift, index, eps, weight, bias, rms, base), int8)


@op(kernel_if=_one_kernel_dtype, of=("x", "gate", "y_weight"))
def gate_add(
    x: Tensor, y: Tensor, gate: Tensor | None, index: Tensor | None, eps: float = 1e-6, y_weight: Tensor | None = None
) -> Tensor:
    """x + gate * y, or with `y_weight` x + gate * rms_norm(y) * y_weight: adds a sublayer's output to the stream.

    x, y: [T, C], one dtype. gate: [M, C]; None is 1. index: int32 [T], as in `norm_modulate`. y_weight: [C].
    Returns a new contiguous [T, C] in x's dtype. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    _check("gate_add", x, index, y, gate=gate, y_weight=y_weight)
    return _summed(x, y, gate, index, eps, y_weight)


@op(kernel_if=_one_kernel_dtype, of=("x", "gate", "scale", "shift", "weight", "bias", "y_weight"))
def gate_add_norm_modulate(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
    y_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gate_add`, and `norm_modulate` of the sum, in one pass: the sum and the normed sum, each [T, C] in x's dtype.

    Both equal the results of the two calls. gate, scale and shift have one dtype and as many rows; both norms have
    `eps`.
    """
    vectors = {"weight": weight, "bias": bias, "y_weight": y_weight}
    _check("gate_add_norm_modulate", x, index, y, gate=gate, scale=scale, shift=shift, **vectors)
    total = _summed(x, y, gate, index, eps, y_weight)
    return total, _normed(total, scale, shift, index, eps, weight, bias, rms, base).to(x.dtype).contiguous()


@op(kernel_if=_one_kernel_dtype, of=("x", "gate", "scale", "shift", "weight", "bias", "y_weight"))
def gate_add_norm_modulate_quantize(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
    y_weight: Tensor | None = None,
    *,
    int8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_add`, and `norm_modulate_quantize` of the sum: the sum, quantized values [T, C] and scales float32 [T]."""
    vectors = {"weight": weight, "bias": bias, "y_weight": y_weight}
    _check("gate_add_norm_modulate_quantize", x, index, y, gate=gate, scale=scale, shift=shift, **vectors)
    total = _summed(x, y, gate, index, eps, y_weight)
    return total, *quantize_reference(_normed(total, scale, shift, index, eps, weight, bias, rms, base), int8)


def _summed(
    x: Tensor, y: Tensor, gate: Tensor | None, index: Tensor | None, eps: float, y_weight: Tensor | None
) -> Tensor:
    math = torch.promote_types(x.dtype, torch.float32)
    added = y.to(math)
    if y_weight is not None:
        added = F.rms_norm(added, (y.shape[1],), y_weight.to(math), eps)
    if gate is not None:
        added = added * _rows_of_tokens(gate, index).to(math)
    return (x.to(math) + added).to(x.dtype).contiguous()


def _normed(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    rms: bool,
    base: float,
) -> Tensor:
    """The second half, not rounded to x's dtype."""
    math = torch.promote_types(x.dtype, torch.float32)
    shape = (x.shape[1],)
    out = F.rms_norm(x.to(math), shape, eps=eps) if rms else F.layer_norm(x.to(math), shape, eps=eps)
    if weight is not None:
        out = out * weight.to(math)
    if bias is not None:
        out = out + bias.to(math)
    if scale is not None:
        out = out * (base + _rows_of_tokens(scale, index).to(math))
    if shift is not None:
        out = out + _rows_of_tokens(shift, index).to(math)
    return out


def _rows_of_tokens(table: Tensor, index: Tensor | None) -> Tensor:
    return table if index is None or table.shape[0] == 1 else table.index_select(0, index)


# --- checks -------------------------------------------------------------------------------------------------


def _check(op: str, x: Tensor, index: Tensor | None, y: Tensor | None = None, **parameters: Tensor | None) -> None:
    torch._check(x.dim() == 2, lambda: f"{op}: x must be [T, C], got {x.dim()} dimensions")
    if y is not None:
        torch._check(y.shape == x.shape, lambda: f"{op}: y must have the shape of x, {tuple(x.shape)}")
        torch._check(y.dtype == x.dtype, lambda: f"{op}: x and y must have the same dtype, got {x.dtype} and {y.dtype}")
    given = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    tables = {name: table for name, table in given.items() if name in TABLES}
    for name, table in tables.items():
        _check_table(op, x, name, table, *next(iter(tables.items())))
    for name, vector in given.items():
        torch._check(
            name in TABLES or vector.shape == x.shape[1:],
            lambda name=name: f"{op}: {name} must be [C] with C = {x.shape[1]}",
        )
    _check_index(op, x, index, tables)
    torch._check(
        all(tensor is None or tensor.device == x.device for tensor in (y, index, *given.values())),
        lambda: f"{op}: all tensors must be on one device",
    )


def _check_table(op: str, x: Tensor, name: str, table: Tensor, first: str, like: Tensor) -> None:
    torch._check(table.dim() == 2, lambda: f"{op}: {name} must be [M, C], got {table.dim()} dimensions")
    torch._check(table.shape[1] == x.shape[1], lambda: f"{op}: x has {x.shape[1]} channels and {name} {table.shape[1]}")
    torch._check(
        table.shape[0] == like.shape[0], lambda: f"{op}: {first} has {like.shape[0]} rows and {name} {table.shape[0]}"
    )
    torch._check(
        table.dtype == like.dtype,
        lambda: f"{op}: {first} and {name} must have the same dtype, got {like.dtype} and {table.dtype}",
    )


def _check_index(op: str, x: Tensor, index: Tensor | None, tables: dict[str, Tensor]) -> None:
    if index is None:
        for name, table in tables.items():
            torch._check(
                table.shape[0] == 1,
                lambda name=name, rows=table.shape[0]: (
                    f"{op}: index is missing: {name} has {rows} rows, and each token needs the number of its own"
                ),
            )
        return
    torch._check(
        index.dtype == torch.int32 and index.dim() == 1,
        lambda: f"{op}: index must be int32 [T], got {index.dtype} with {index.dim()} dimensions",
    )
    torch._check(
        index.shape[0] == x.shape[0], lambda: f"{op}: index has {index.shape[0]} entries for {x.shape[0]} tokens"
    )
