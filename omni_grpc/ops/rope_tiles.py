"""From what projections wrote to what `ops.attention_q` reads: `ops.rope` and `attention_quantize` in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.attention_q import (
    CodedTiles,
    attention_quantize_fake,
    attention_quantize_reference,
    with_whole_heads,
)
from omni_grpc.ops.library import declare
from omni_grpc.ops.rope import Heads, Operands, joined, parts_of

NORMS = ("none", "rms", "rms_across")


def qk_norm_rope_code_tiles(
    streams: Sequence[Heads],
    table: Tensor | None,
    place: Sequence[Tensor],
    cu: Tensor,
    *,
    norm: str,
    eps: float = 1e-6,
) -> CodedTiles:
    """What `ops.rope.qk_norm_rope` makes, with pairs that are neighbours, as operands of `attention_q`.

    cu: int32 [R + 1], the offsets of the rows in the result. norm: one of NORMS, without biases. On CUDA bfloat16 and
    heads of 128 channels; smaller ones get channels of zeros elsewhere. Raises RuntimeError where shapes, dtypes or
    devices disagree.
    """
    q, k, v, weights, _ = parts_of(streams)
    return CodedTiles(*_code_tiles(q, k, v, weights, table, list(place), cu, norm, eps))


def qk_norm_rope_code_tiles_reference(
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
    """The definition of `qk_norm_rope_code_tiles`."""
    _check(v, norm)
    whole_q, whole_k, whole_v = map(
        with_whole_heads, joined(Operands(q, k, v, weights, [], table, place, norm, "interleaved", eps))
    )
    return attention_quantize_reference(whole_q, whole_k, whole_v, cu, cu)


def _code_tiles_fake(
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
    _check(v, norm)
    tokens = sum(x.shape[0] for x in q)
    whole_q, whole_k, whole_v = (with_whole_heads(x[0].new_empty(tokens, *x[0].shape[1:])) for x in (q, k, v))
    return attention_quantize_fake(whole_q, whole_k, whole_v, cu, cu)


def _check(v: Sequence[Tensor], norm: str) -> None:
    torch._check(len(v) > 0, lambda: "qk_norm_rope: codes are made of q, k and v, and there is no v")
    torch._check(norm in NORMS, lambda: f"qk_norm_rope: tiles of codes have a norm of {', '.join(NORMS)}, got {norm}")


_code_tiles = declare(
    "qk_norm_rope_code_tiles(Tensor[] q, Tensor[] k, Tensor[] v, Tensor[] weights, Tensor? table, Tensor[] place, "
    "Tensor cu, str norm, float eps) -> Tensor[]",
    reference=qk_norm_rope_code_tiles_reference,
    fake=_code_tiles_fake,
)
