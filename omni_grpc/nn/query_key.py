"""Between the projections and attention: norms of queries and keys, rotary embedding and the joint order of streams, in
one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from torch import Tensor, nn

from omni_grpc.nn.activations import norm_rope_attention
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.norms import AcrossHeadsNorm
from omni_grpc.nn.rows import JOINT, Rows
from omni_grpc.ops.rope import Heads, qk_norm_rope


class Projected(NamedTuple):
    """The projections of a stream, q [T_s, H, D], k and v [T_s, K, D], and the norms of q and k.

    A norm is nn.RMSNorm over each head, AcrossHeadsNorm, or what a feature put in its place. In the last case the
    module itself is called, with the heads of a token side by side, [T_s, H * D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norm_q: nn.Module
    norm_k: nn.Module


def attend(attention: Attention, part: Projected, table: Tensor, rows: Rows, over: str = JOINT) -> Tensor:
    """Self attention of stream `over`, [T_s, H, D], after norms and rotary embedding by table [T_s, R, 2]."""
    return _attend(attention, [part], table, (), rows, over)


def attend_joint(attention: Attention, parts: Mapping[str, Projected], table: Tensor, rows: Rows) -> Tensor:
    """Self attention of all streams of "joint", in its order, [T_joint, H, D]."""
    return _attend(attention, list(parts.values()), table, [rows.place[name] for name in parts], rows, JOINT)


def norm_rope(part: Projected, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one stream; q and k are normed and rotated by table [T_s, R, 2], see ops.rope."""
    return _norm_rope([part], table, ())


def norm_rope_joint(parts: Mapping[str, Projected], table: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of all streams of "joint", in its order; q and k are normed and rotated by table [T_joint, R, 2]."""
    return _norm_rope(list(parts.values()), table, [rows.place[name] for name in parts])


def _attend(
    attention: Attention, parts: Sequence[Projected], table: Tensor, place: Sequence[Tensor], rows: Rows, over: str
) -> Tensor:
    if kind := _kind(parts):
        return norm_rope_attention(attention, _fused(parts), table, place, rows, over, norm=kind, eps=_eps(parts))
    out: Tensor = attention(*_norm_rope(parts, table, place), rows, over=over)
    return out


def _norm_rope(parts: Sequence[Projected], table: Tensor, place: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    if kind := _kind(parts):
        return qk_norm_rope(_fused(parts), table, place, norm=kind, eps=_eps(parts))
    streams = [Heads(_single_norm(part.norm_q, part.q), _single_norm(part.norm_k, part.k), part.v) for part in parts]
    return qk_norm_rope(streams, table, place)


def _kind(parts: Sequence[Projected]) -> str:
    """The kind of norm, as ops.rope names it, if all of them are of that kind; else ""."""
    norms = {type(norm) for part in parts for norm in (part.norm_q, part.norm_k)}
    return {nn.RMSNorm: "rms", AcrossHeadsNorm: "rms_across"}.get(norms.pop(), "") if len(norms) == 1 else ""


def _fused(parts: Sequence[Projected]) -> list[Heads]:
    return [
        Heads(part.q, part.k, part.v, (cast(Tensor, part.norm_q.weight), cast(Tensor, part.norm_k.weight)))
        for part in parts
    ]


def _eps(parts: Sequence[Projected]) -> float:
    return cast(float, parts[0].norm_q.eps)


def _single_norm(norm: nn.Module, x: Tensor) -> Tensor:
    normed: Tensor = norm(x.flatten(1)).view(x.shape)
    return normed
