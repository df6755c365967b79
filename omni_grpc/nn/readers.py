"""What linear layers read, made as they want it: where all that read a tensor work in the same 8 bits, it is Coded,
once for all of them and by the kernel that makes it; else it is in full precision.

A block says who its `readers` are, and hands on what it gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.nn.linear import AnyLinear, Coded
from omni_grpc.nn.rows import Rows
from omni_grpc.ops.norm import (
    gate_add_norm_modulate,
    gate_add_norm_modulate_quantize,
    norm_modulate,
    norm_modulate_quantize,
)
from omni_grpc.ops.quant import (
    beside_gelu_tanh,
    beside_gelu_tanh_quantize_rows,
    gelu_tanh,
    gelu_tanh_quantize_rows,
    quantize_rows,
    silu_mul,
    silu_mul_quantize_rows,
)

Read = Tensor | Coded
Readers = Sequence[AnyLinear]


def normed(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    readers: Readers,
    **norm: Any,
) -> Read:
    """ops.norm.norm_modulate of [T, C], with its keywords."""
    kind = wanted(readers)
    if kind is None:
        return norm_modulate(x, scale, shift, index, eps, **norm)
    return Coded(*norm_modulate_quantize(x, scale, shift, index, kind, eps, **norm), x.dtype)


def added_normed(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    readers: Readers,
    **norm: Any,
) -> tuple[Tensor, Read]:
    """ops.norm.gate_add_norm_modulate of [T, C], with its keywords: the sum, and what the readers get of it."""
    kind = wanted(readers)
    if kind is None:
        return gate_add_norm_modulate(x, y, gate, scale, shift, index, eps, **norm)
    total, codes, scales = gate_add_norm_modulate_quantize(x, y, gate, scale, shift, index, kind, eps, **norm)
    return total, Coded(codes, scales, x.dtype)


def gelu(layer: AnyLinear, x: Read, readers: Readers) -> Read:
    """ops.quant.gelu_tanh of what the layer makes of x [T, C]."""
    kind = wanted(readers)
    if kind is None and isinstance(x, Tensor):
        return layer.gelu(x)
    out: Tensor = layer(x)
    return gelu_tanh(out) if kind is None else Coded(*gelu_tanh_quantize_rows(out, kind), out.dtype)


def beside_gelu(x: Tensor, y: Tensor, readers: Readers) -> Read:
    """ops.quant.beside_gelu_tanh of [T, C] and [T, D]."""
    kind = wanted(readers)
    if kind is None:
        return beside_gelu_tanh(x, y)
    return Coded(*beside_gelu_tanh_quantize_rows(x, y, kind), x.dtype)


def gated_silu(x: Tensor, up: Tensor, readers: Readers) -> Read:
    """ops.quant.silu_mul of [T, C]."""
    kind = wanted(readers)
    if kind is None:
        return silu_mul(x, up)
    return Coded(*silu_mul_quantize_rows(x, up, kind), x.dtype)


def split(joint: Tensor, rows: Rows, readers: Mapping[str, AnyLinear]) -> dict[str, Read]:
    """rows.split of [T_joint, C]: each stream of "joint" for the layer that reads it. Tokens that lie apart are coded
    on their way.
    """
    if rows.single:
        return dict(rows.split(joint))
    return {
        name: joint.index_select(0, rows.place[name]) if kind is None else coded(joint, kind, rows.place[name])
        for name, kind in ((name, wanted((reader,))) for name, reader in readers.items())
    }


def wanted(readers: Readers) -> torch.dtype | None:
    """The 8 bits that all of them work in; None where there are none, or several."""
    kinds = {reader.codes for reader in readers}
    return kinds.pop() if len(kinds) == 1 else None


def coded(x: Tensor, kind: torch.dtype, index: Tensor | None = None) -> Coded:
    """x [T, C], or its rows that index names, in `kind`."""
    return Coded(*quantize_rows(x, kind, index), x.dtype)
