"""The norm family: normalisation fused with the elementwise work around it.

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

from omni_grpc.ops.library import declare
from omni_grpc.ops.quant import KERNEL_DTYPES, is_int8, quantize_reference


def norm_modulate(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    *,
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
    call = _norm_modulate if _served(x, scale, shift, weight, bias) else norm_modulate_reference
    out: Tensor = call(x, scale, shift, index, eps, weight, bias, rms, base)
    return out


def norm_modulate_quantize(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    dtype: torch.dtype,
    eps: float = 1e-6,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`norm_modulate`, then `quantize_rows` of what it is before it is rounded: codes [T, C] and scales float32 [T].

    dtype: torch.float8_e4m3fn or torch.int8.
    """
    call = _norm_modulate_quantize if _served(x, scale, shift, weight, bias) else norm_modulate_quantize_reference
    codes, scales = call(x, scale, shift, index, eps, weight, bias, rms, base, is_int8(dtype))
    return codes, scales


def gate_add(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    *,
    y_weight: Tensor | None = None,
) -> Tensor:
    """x + gate * y, or with `y_weight` x + gate * rms_norm(y) * y_weight: a sublayer's output into the stream.

    x, y: [T, C], one dtype. gate: [M, C]; None is 1. index: int32 [T], as in `norm_modulate`. y_weight: [C].
    Returns a new contiguous [T, C] in x's dtype. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    call = _gate_add if _served(x, gate, y_weight) else gate_add_reference
    out: Tensor = call(x, y, gate, index, eps, y_weight)
    return out


def gate_add_norm_modulate(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float = 1e-6,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
    y_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gate_add`, and `norm_modulate` of the sum, in one pass: the sum and the normed sum, each [T, C] in x's dtype.

    Both are what the two calls give. gate, scale and shift have one dtype and as many rows; both norms have `eps`.
    """
    served = _served(x, gate, scale, shift, weight, bias, y_weight)
    call = _gate_add_norm_modulate if served else gate_add_norm_modulate_reference
    total, out = call(x, y, gate, scale, shift, index, eps, weight, bias, rms, base, y_weight)
    return total, out


def gate_add_norm_modulate_quantize(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    dtype: torch.dtype,
    eps: float = 1e-6,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    base: float = 1.0,
    y_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_add`, and `norm_modulate_quantize` of the sum: the sum, codes [T, C] and scales float32 [T]."""
    served = _served(x, gate, scale, shift, weight, bias, y_weight)
    call = _gate_add_norm_modulate_quantize if served else gate_add_norm_modulate_quantize_reference
    total, codes, scales = call(x, y, gate, scale, shift, index, eps, weight, bias, rms, base, y_weight, is_int8(dtype))
    return total, codes, scales


def _served(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether kernels serve these dtypes: the modulation and the norm's own vectors have one, whatever x's is."""
    first = None
    for parameter in parameters:
        if parameter is None:
            continue
        first = first or parameter.dtype
        if parameter.dtype != first:
            return False
    return x.dtype in KERNEL_DTYPES and (first is None or first in KERNEL_DTYPES)


# --- the definitions: what the kernels are compared with --------------------------------------------------------------


def norm_modulate_reference(
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
    _check("norm_modulate", x, index, tables={"scale": scale, "shift": shift}, vectors={"weight": weight, "bias": bias})
    return _normed(x, scale, shift, index, eps, weight, bias, rms, base).to(x.dtype).contiguous()


def norm_modulate_quantize_reference(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    rms: bool,
    base: float,
    int8: bool,
) -> tuple[Tensor, Tensor]:
    tables, vectors = {"scale": scale, "shift": shift}, {"weight": weight, "bias": bias}
    _check("norm_modulate_quantize", x, index, tables=tables, vectors=vectors)
    return quantize_reference(_normed(x, scale, shift, index, eps, weight, bias, rms, base), int8)


def gate_add_reference(
    x: Tensor, y: Tensor, gate: Tensor | None, index: Tensor | None, eps: float = 1e-6, y_weight: Tensor | None = None
) -> Tensor:
    _check("gate_add", x, index, y=y, tables={"gate": gate}, vectors={"y_weight": y_weight})
    return _summed(x, y, gate, index, eps, y_weight)


def gate_add_norm_modulate_reference(
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
    tables = {"gate": gate, "scale": scale, "shift": shift}
    vectors = {"weight": weight, "bias": bias, "y_weight": y_weight}
    _check("gate_add_norm_modulate", x, index, y=y, tables=tables, vectors=vectors)
    total = _summed(x, y, gate, index, eps, y_weight)
    return total, _normed(total, scale, shift, index, eps, weight, bias, rms, base).to(x.dtype).contiguous()


def gate_add_norm_modulate_quantize_reference(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    rms: bool,
    base: float,
    y_weight: Tensor | None,
    int8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tables = {"gate": gate, "scale": scale, "shift": shift}
    vectors = {"weight": weight, "bias": bias, "y_weight": y_weight}
    _check("gate_add_norm_modulate_quantize", x, index, y=y, tables=tables, vectors=vectors)
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
        added = added * _of_tokens(gate, index).to(math)
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
        out = out * (base + _of_tokens(scale, index).to(math))
    if shift is not None:
        out = out + _of_tokens(shift, index).to(math)
    return out


def _of_tokens(table: Tensor, index: Tensor | None) -> Tensor:
    return table if index is None or table.shape[0] == 1 else table.index_select(0, index)


# --- checks -------------------------------------------------------------------------------------------------


def _check(
    op: str,
    x: Tensor,
    index: Tensor | None,
    *,
    y: Tensor | None = None,
    tables: dict[str, Tensor | None],
    vectors: dict[str, Tensor | None],
) -> None:
    torch._check(x.dim() == 2, lambda: f"{op}: x must be [T, C], got {x.dim()} dimensions")
    if y is not None:
        torch._check(y.shape == x.shape, lambda: f"{op}: y must have the shape of x, {tuple(x.shape)}")
        torch._check(y.dtype == x.dtype, lambda: f"{op}: x is {x.dtype} and y {y.dtype}; they must be alike")
    given = {name: table for name, table in tables.items() if table is not None}
    for name, table in given.items():
        _check_table(op, x, name, table, *next(iter(given.items())))
    for name, vector in vectors.items():
        torch._check(
            vector is None or vector.shape == x.shape[1:],
            lambda name=name: f"{op}: {name} must be [C] with C = {x.shape[1]}",
        )
    _check_index(op, x, index, given)
    tensors = (y, index, *given.values(), *vectors.values())
    torch._check(
        all(tensor is None or tensor.device == x.device for tensor in tensors),
        lambda: f"{op}: all tensors must be on one device",
    )


def _check_table(op: str, x: Tensor, name: str, table: Tensor, first: str, like: Tensor) -> None:
    torch._check(table.dim() == 2, lambda: f"{op}: {name} must be [M, C], got {table.dim()} dimensions")
    torch._check(table.shape[1] == x.shape[1], lambda: f"{op}: x has {x.shape[1]} channels and {name} {table.shape[1]}")
    torch._check(
        table.shape[0] == like.shape[0],
        lambda: f"{op}: {first} has {like.shape[0]} rows and {name} {table.shape[0]}",
    )
    torch._check(
        table.dtype == like.dtype, lambda: f"{op}: {first} is {like.dtype} and {name} {table.dtype}; they must be alike"
    )


def _check_index(op: str, x: Tensor, index: Tensor | None, tables: dict[str, Tensor]) -> None:
    if index is None:
        for name, table in tables.items():
            torch._check(
                table.shape[0] == 1,
                lambda name=name, rows=table.shape[0]: (
                    f"{op}: which of the {rows} rows of {name} a token takes is not said: index is missing"
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


# The references give the shapes and dtypes without data too.
_norm_modulate = declare(
    "norm_modulate(Tensor x, Tensor? scale, Tensor? shift, Tensor? index, float eps=1e-6, Tensor? weight=None, "
    "Tensor? bias=None, bool rms=False, float base=1.0) -> Tensor",
    reference=norm_modulate_reference,
    fake=norm_modulate_reference,
)
_norm_modulate_quantize = declare(
    "norm_modulate_quantize(Tensor x, Tensor? scale, Tensor? shift, Tensor? index, float eps, Tensor? weight, "
    "Tensor? bias, bool rms, float base, bool int8) -> (Tensor, Tensor)",
    reference=norm_modulate_quantize_reference,
    fake=norm_modulate_quantize_reference,
)
_gate_add = declare(
    "gate_add(Tensor x, Tensor y, Tensor? gate, Tensor? index, float eps=1e-6, Tensor? y_weight=None) -> Tensor",
    reference=gate_add_reference,
    fake=gate_add_reference,
)
_gate_add_norm_modulate = declare(
    "gate_add_norm_modulate(Tensor x, Tensor y, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? index, "
    "float eps=1e-6, Tensor? weight=None, Tensor? bias=None, bool rms=False, float base=1.0, Tensor? y_weight=None) "
    "-> (Tensor, Tensor)",
    reference=gate_add_norm_modulate_reference,
    fake=gate_add_norm_modulate_reference,
)
_gate_add_norm_modulate_quantize = declare(
    "gate_add_norm_modulate_quantize(Tensor x, Tensor y, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? index, "
    "float eps, Tensor? weight, Tensor? bias, bool rms, float base, Tensor? y_weight, bool int8) "
    "-> (Tensor, Tensor, Tensor)",
    reference=gate_add_norm_modulate_quantize_reference,
    fake=gate_add_norm_modulate_quantize_reference,
)
