"""Between an attention's projections and the attention itself: norms of queries and keys, their rotation and the joint
order of streams, in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from torch import Tensor, nn

from omni_grpc.nn.norms import AcrossHeadsNorm
from omni_grpc.nn.rows import Rows
from omni_grpc.ops.rope import Heads, qk_norm_rope


class Projected(NamedTuple):
    """What a stream's projections made, q [T_s, H, D], k and v [T_s, K, D], and the norms that q and k go through.

    A norm is nn.RMSNorm over each head, AcrossHeadsNorm, or what a feature put in the place of that: such a module is
    called by itself, and gets a token's heads side by side, [T_s, H * D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norm_q: nn.Module
    norm_k: nn.Module


def rotated(part: Projected, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one stream, q and k normed and turned by table [T_s, R, 2], see ops.rope."""
    return _rotated([part], table, ())


def rotated_joint(parts: Mapping[str, Projected], table: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of all streams of "joint" in its order, q and k normed and turned by table [T_joint, R, 2]."""
    return _rotated(list(parts.values()), table, [rows.place[name] for name in parts])


def _rotated(parts: Sequence[Projected], table: Tensor, place: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    norms = [norm for part in parts for norm in (part.norm_q, part.norm_k)]
    if all(type(norm) is nn.RMSNorm for norm in norms):
        kind = "rms"
    elif all(type(norm) is AcrossHeadsNorm for norm in norms):
        kind = "rms_across"
    else:
        streams = [Heads(_alone(part.norm_q, part.q), _alone(part.norm_k, part.k), part.v) for part in parts]
        return qk_norm_rope(streams, table, place)
    streams = [
        Heads(part.q, part.k, part.v, (cast(Tensor, part.norm_q.weight), cast(Tensor, part.norm_k.weight)))
        for part in parts
    ]
    return qk_norm_rope(streams, table, place, norm=kind, eps=cast(float, norms[0].eps))


def _alone(norm: nn.Module, x: Tensor) -> Tensor:
    normed: Tensor = norm(x.flatten(1)).view(x.shape)
    return normed
