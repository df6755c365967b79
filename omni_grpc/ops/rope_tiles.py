"""From the projections' outputs to the inputs of `ops.attention_q`: `ops.rope` and `attention_quantize` in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.ops.attention_q import QuantizedTiles, attention_quantize_fake, attention_quantize_op, with_whole_heads
from omni_grpc.ops.declare import op
from omni_grpc.ops.rope import Heads, RopeOperands, joined, parts_of

NORMS = ("none", "rms", "rms_across")


def qk_norm_rope_quantize_tiles(
    streams: Sequence[Heads], table: Tensor | None, place: Sequence[Tensor], cu: Tensor, *, norm: str, eps: float = 1e-6
) -> QuantizedTiles:
    """`ops.rope.qk_norm_rope` with interleaved pairs, as operands of `attention_q`.

    cu: int32 [R + 1], the offsets of the rows in the result. norm: one of NORMS, without biases. On CUDA bfloat16 and
    heads of 128 channels; smaller ones get channels of zeros elsewhere. Raises RuntimeError where shapes, dtypes or
    devices disagree.
    """
    q, k, v, weights, _ = parts_of(streams)
    return QuantizedTiles(*qk_norm_rope_quantize_tiles_op.overload(q, k, v, weights, table, list(place), cu, norm, eps))


def _fake(*arguments: Any) -> list[Tensor]:
    q, k, v, _, _, _, cu, norm, _ = arguments
    _check(v, norm)
    tokens = sum(x.shape[0] for x in q)
    whole_q, whole_k, whole_v = (with_whole_heads(x[0].new_empty(tokens, *x[0].shape[1:])) for x in (q, k, v))
    return attention_quantize_fake(whole_q, whole_k, whole_v, cu, cu)


@op(fake=_fake)
def qk_norm_rope_quantize_tiles_op(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor | None,
    place: Sequence[Tensor],
    cu: Tensor,
    norm: str,
    eps: float,
) -> list[Tensor]:
    """`qk_norm_rope_quantize_tiles` of each stream's q [T_s, H, D], k, v [T_s, K, D]: the parts of QuantizedTiles."""
    _check(v, norm)
    whole_q, whole_k, whole_v = map(
        with_whole_heads, joined(RopeOperands(q, k, v, weights, [], table, place, norm, "interleaved", eps))
    )
    return attention_quantize_op.reference(whole_q, whole_k, whole_v, cu, cu)


def _check(v: Sequence[Tensor], norm: str) -> None:
    torch._check(len(v) > 0, lambda: "qk_norm_rope: quantization needs q, k and v, and v is missing")
    torch._check(norm in NORMS, lambda: f"qk_norm_rope: quantized tiles need a norm of {', '.join(NORMS)}, got {norm}")
