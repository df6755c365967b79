"""What linear layers and attention read, in the precision in which they read it: the one place in `nn` that knows that
activations may be quantized.

A block says who reads a tensor (`readers`) and passes on what it gets. Where all readers work in the same 8 bits, that
is a `QuantizedActivation`, made once for all of them by the kernel that computes the tensor; otherwise it is a Tensor
in full precision. Likewise for attention: where it reads 8 bits, the pass that norms and rotates queries and keys
writes them.

T: packed tokens. C, D: channels; H, K: query and key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omni_grpc.config.backends import BACKENDS, kernel_for
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.rows import Rows
from omni_grpc.ops.attention import varlen_attention_quantized
from omni_grpc.ops.attention_q import QuantizedTiles, attention_q
from omni_grpc.ops.heads import QuantizedHeads
from omni_grpc.ops.norm import (
    gate_add_norm_modulate,
    gate_add_norm_modulate_quantize,
    norm_modulate,
    norm_modulate_quantize,
)
from omni_grpc.ops.quant import (
    concat_gelu_tanh,
    concat_gelu_tanh_quantize_rows,
    gelu_tanh,
    gelu_tanh_quantize_rows,
    is_int8,
    quantize_rows,
    quantize_rows_to,
    silu_mul,
    silu_mul_quantize_rows,
)
from omni_grpc.ops.rope import Heads
from omni_grpc.ops.rope_heads import qk_norm_rope_quantize_heads
from omni_grpc.ops.rope_tiles import qk_norm_rope_quantize_tiles


class QuantizedActivation(NamedTuple):
    """Tokens in 8 bits: codes [T, C] and float32 scales [T], as `ops.quant` makes them, of tokens in `dtype`."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


Activation = Tensor | QuantizedActivation
"""Tokens [T, C] as a linear layer reads them."""

Readers = Sequence[AnyLinear]
"""All linear layers that read one tensor."""


def quantize(
    x: Tensor, dtype: torch.dtype, index: Tensor | None = None, *, peak: Tensor | None = None
) -> QuantizedActivation:
    """x [T, C] in 8 bits: `dtype` is float8_e4m3fn or int8. With `index` [S], those rows of x alone, in its order. With
    `peak`, float32 [T], scales are those of tokens with these largest magnitudes, of which x has some channels.
    """
    if peak is not None:
        return QuantizedActivation(*quantize_rows_to(x, dtype, peak), x.dtype)
    return QuantizedActivation(*quantize_rows(x, dtype, index), x.dtype)


def read_dtype(readers: Readers) -> torch.dtype | None:
    """The 8 bits that all of them read; None where one of them reads full precision, or they differ."""
    dtypes = {reader.activation_dtype for reader in readers}
    return dtypes.pop() if len(dtypes) == 1 else None


def for_readers(x: Activation, readers: Readers) -> Activation:
    """x [T, C] as its readers read it, converted once for all of them."""
    dtype = read_dtype(readers)
    return quantize(x, dtype) if dtype is not None and isinstance(x, Tensor) else x


def norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    readers: Readers,
    **options: Any,
) -> Activation:
    """`ops.norm.norm_modulate` of x [T, C], with its keywords, for `readers`."""
    dtype = read_dtype(readers)
    if dtype is None:
        return norm_modulate(x, scale, shift, index, eps, **options)
    return QuantizedActivation(
        *norm_modulate_quantize(x, scale, shift, index, eps, int8=is_int8(dtype), **options), x.dtype
    )


def add_norm(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    eps: float,
    readers: Readers,
    **options: Any,
) -> tuple[Tensor, Activation]:
    """`ops.norm.gate_add_norm_modulate` of x and y [T, C], with its keywords: the sum [T, C], and its norm for
    `readers`.
    """
    dtype = read_dtype(readers)
    if dtype is None:
        return gate_add_norm_modulate(x, y, gate, scale, shift, index, eps, **options)
    int8 = is_int8(dtype)
    total, codes, scales = gate_add_norm_modulate_quantize(x, y, gate, scale, shift, index, eps, int8=int8, **options)
    return total, QuantizedActivation(codes, scales, x.dtype)


def gelu(layer: AnyLinear, x: Activation, readers: Readers) -> Activation:
    """`ops.quant.gelu_tanh` of `layer(x)`, x [T, C], for `readers`."""
    dtype = read_dtype(readers)
    if dtype is None and isinstance(x, Tensor):
        return layer.gelu(x)
    out: Tensor = layer(x)
    return (
        gelu_tanh(out)
        if dtype is None
        else QuantizedActivation(*gelu_tanh_quantize_rows(out, is_int8(dtype)), out.dtype)
    )


def concat_gelu(x: Tensor, y: Tensor, readers: Readers) -> Activation:
    """x [T, C] and gelu(y) of y [T, D], side by side [T, C + D], for `readers` (`ops.quant.concat_gelu_tanh`)."""
    dtype = read_dtype(readers)
    if dtype is None:
        return concat_gelu_tanh(x, y)
    return QuantizedActivation(*concat_gelu_tanh_quantize_rows(x, y, is_int8(dtype)), x.dtype)


def silu_gate(x: Tensor, up: Tensor, readers: Readers) -> Activation:
    """silu(x) * up, both [T, C], for `readers` (`ops.quant.silu_mul`)."""
    dtype = read_dtype(readers)
    if dtype is None:
        return silu_mul(x, up)
    return QuantizedActivation(*silu_mul_quantize_rows(x, up, is_int8(dtype)), x.dtype)


def split_joint(joint: Tensor, rows: Rows, readers: Mapping[str, AnyLinear]) -> dict[str, Activation]:
    """`rows.split` of joint [T_joint, C]: each stream of "joint" for the layer that reads it. Tokens that have to be
    gathered are quantized by the same pass.
    """
    if rows.single:
        return dict(rows.split(joint))
    parts: dict[str, Activation] = {}
    for stream, reader in readers.items():
        dtype, place = read_dtype((reader,)), rows.place[stream]
        parts[stream] = joint.index_select(0, place) if dtype is None else quantize(joint, dtype, place)
    return parts


def attention_in_8_bits(
    attention: Attention,
    heads: Sequence[Heads],
    table: Tensor,
    place: Sequence[Tensor],
    rows: Rows,
    over: str,
    *,
    norm: str,
    eps: float,
) -> Tensor | None:
    """Self attention of stream `over`, [T, H, D], of heads that are normed and rotated first, where it reads 8 bits:
    the norms bound the values, so one pass norms, rotates and quantizes. For `heads`, `table`, `place`, `norm` and
    `eps` see `ops.rope.qk_norm_rope`. None: it reads full precision.
    """
    kernel, x = attention.computed_by(rows), heads[0].q
    kind = None if kernel is None else attention_input(kernel, x)
    if kernel is None or kind is None:
        return None
    stream = rows.stream(over)
    if kind is QuantizedTiles:
        tiles = qk_norm_rope_quantize_tiles(heads, table, place, stream.cu, norm=norm, eps=eps)
        out = attention_q(tiles, stream.cu, stream.cu, stream.total, kernel.softmax_scale)
        return (out if out.shape[2] == kernel.head_size else out[..., : kernel.head_size]).to(x.dtype)
    return varlen_attention_quantized(
        *qk_norm_rope_quantize_heads(heads, table, place, stream.cu, norm=norm, eps=eps),
        stream.cu,
        stream.cu,
        stream.longest,
        stream.longest,
        kernel.softmax_scale,
        kernel.causal,
        x.dtype,
        kernel.backend,
        stream.host,
        stream.host,
    )


def attention_input(attention: Attention, x: Tensor) -> type[QuantizedHeads] | type[QuantizedTiles] | None:
    """The form in 8 bits that an attention reads queries, keys and values like x [T, H, D] in; None: full precision."""
    named = attention.candidates(x.device, x.dtype)[0]
    if BACKENDS[named.partition(" ")[0]].tiles:
        return None if x.is_cuda and x.dtype != torch.bfloat16 else QuantizedTiles
    return QuantizedHeads if kernel_for(named, quantized=True) else None
