"""Between the projections and attention: norms of queries and keys, rotary embedding and the joint order of streams, in
one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from omni_grpc.nn.activations import attention_in_8_bits
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.coming import Begun, there
from omni_grpc.nn.norms import AcrossHeadsNorm
from omni_grpc.nn.row_changes import is_changed, normed
from omni_grpc.nn.rows import JOINT, Rows
from omni_grpc.ops.rope import Heads, qk_norm_rope, qk_norm_rope_alone


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
    return begin_attend(attention, part, table, rows, over)()


def begin_attend(attention: Attention, part: Projected, table: Tensor, rows: Rows, over: str = JOINT) -> Begun:
    """Begins `attend`: what has to be waited for runs beside whatever is computed before its result is asked for."""
    return _begin(attention, {over: part}, lambda: part.v, table, (), rows, over)


def attend_joint(attention: Attention, parts: Mapping[str, Projected], table: Tensor, rows: Rows) -> Tensor:
    """Self attention of all streams of "joint", in its order, [T_joint, H, D]."""
    place = [rows.place[name] for name in parts]

    def values() -> Tensor:
        return rows.join({name: part.v for name, part in parts.items()})

    return _begin(attention, parts, values, table, place, rows, JOINT)()


def norm_rope(part: Projected, table: Tensor, stream: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one stream; q and k are normed and rotated by table [T_s, R, 2], see ops.rope."""
    return _norm_rope({stream: part}, table, ())


def norm_rope_joint(parts: Mapping[str, Projected], table: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of all streams of "joint", in its order; q and k are normed and rotated by table [T_joint, R, 2]."""
    return _norm_rope(parts, table, [rows.place[name] for name in parts])


def _begin(
    attention: Attention,
    parts: Mapping[str, Projected],
    values: Begun,
    table: Tensor,
    place: Sequence[Tensor],
    rows: Rows,
    over: str,
) -> Begun:
    """`values` gives those of all parts, in the order that `place` makes."""
    if kind := _kind(parts):
        out = attention_in_8_bits(attention, _fused(parts), table, place, rows, over, norm=kind, eps=_eps(parts))
        if out is not None:
            return there(out)
    # values need no norm: what they have to wait for runs beside that of queries and keys
    coming = attention.begin_values(values, rows, over)
    if coming is None:
        return attention.begin(*_norm_rope(parts, table, place), rows, over)
    heads, options = _normed(parts)
    return attention.begin(*qk_norm_rope_alone(heads, table, place, **options), coming, rows, over)


def _norm_rope(parts: Mapping[str, Projected], table: Tensor, place: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    heads, options = _normed(parts)
    return qk_norm_rope(heads, table, place, **options)


def _normed(parts: Mapping[str, Projected]) -> tuple[list[Heads], dict[str, Any]]:
    """What `ops.rope` norms, and how; or what is normed already."""
    if kind := _kind(parts):
        return _fused(parts), {"norm": kind, "eps": _eps(parts)}
    heads = [
        Heads(_single_norm(part.norm_q, part.q, stream), _single_norm(part.norm_k, part.k, stream), part.v)
        for stream, part in parts.items()
    ]
    return heads, {}


def _kind(parts: Mapping[str, Projected]) -> str:
    """The kind of norm, as ops.rope names it, if all of them are of that kind and every row has their gains; else
    "".
    """
    norms = [norm for part in parts.values() for norm in (part.norm_q, part.norm_k)]
    kinds = {type(norm) for norm in norms}
    if len(kinds) > 1 or any(map(is_changed, norms)):
        return ""
    return {nn.RMSNorm: "rms", AcrossHeadsNorm: "rms_across"}.get(kinds.pop(), "")


def _fused(parts: Mapping[str, Projected]) -> list[Heads]:
    return [
        Heads(part.q, part.k, part.v, (cast(Tensor, part.norm_q.weight), cast(Tensor, part.norm_k.weight)))
        for part in parts.values()
    ]


def _eps(parts: Mapping[str, Projected]) -> float:
    return cast(float, next(iter(parts.values())).norm_q.eps)


def _single_norm(norm: nn.Module, x: Tensor, stream: str) -> Tensor:
    """x [T, H, D] normed: over each head by nn.RMSNorm, over all at once by any other."""
    return normed(norm, x if type(norm) is nn.RMSNorm else x.flatten(1), stream).view(x.shape)
