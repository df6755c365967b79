"""From what projections wrote to what attention in 8 bits reads: `ops.rope` and `ops.heads` in one.

A norm bounds queries and keys: their root mean square is 1 but for the norm's weights, and a turn changes no length, so
no channel is beyond sqrt(channels) times the largest weight. That gives their scale without a look at them, and since
e4m3 is floating point a scale that is too large costs nothing down to 2^-14 of what it is for. Only values are looked
at for theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.heads import CODES, LARGEST, CodedHeads
from omni_grpc.ops.library import declare
from omni_grpc.ops.rope import Heads, Operands, has_kernel, joined, parts_of

NORMS = ("rms", "rms_across")


def qk_norm_rope_code_heads(
    streams: Sequence[Heads],
    table: Tensor | None,
    place: Sequence[Tensor],
    cu: Tensor,
    *,
    norm: str,
    pairs: str = "interleaved",
    eps: float = 1e-6,
) -> CodedHeads:
    """What `ops.rope.qk_norm_rope` makes, in e4m3 with a scale for each head of each row.

    cu: int32 [R + 1], the offsets of the rows in the result; each stream has its tokens in the order of the rows. norm:
    "rms" or "rms_across", without biases. Scales of values are as `ops.heads.quantize_heads` has them, those of queries
    and keys are what the norm bounds over 448, and 0 where a row has no tokens. Raises RuntimeError where shapes,
    dtypes or devices disagree.
    """
    q, k, v, weights, _ = parts_of(streams)
    op = _code_heads if has_kernel(streams, table) else qk_norm_rope_code_heads_reference
    return CodedHeads(*op(q, k, v, weights, table, list(place), cu, norm, pairs, eps))


def qk_norm_rope_code_heads_reference(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor | None,
    place: Sequence[Tensor],
    cu: Tensor,
    norm: str,
    pairs: str,
    eps: float,
) -> list[Tensor]:
    """The definition of `qk_norm_rope_code_heads`: codes of q, k and v, and scales [3, R, K]."""
    _check(v, cu, norm)
    made = joined(Operands(q, k, v, weights, [], table, place, norm, pairs, eps))
    kv_heads, count = k[0].shape[1], cu.shape[0] - 1
    rows = torch.arange(count, device=cu.device).repeat_interleave(cu.diff())
    codes, scales = [], []
    for which, x in enumerate(made):
        peaks = x.new_zeros(count, kv_heads)
        if which < 2:
            # a stream without tokens has nothing to bound
            used = [weight for part, weight in zip(q, weights[which::2], strict=False) if part.shape[0]]
            peaks += _bound(
                used or [x.new_ones(x.shape[2] * (x.shape[1] if norm == "rms_across" else 1))], x, kv_heads, norm
            )
            peaks[cu.diff() == 0] = 0
        elif len(rows):
            of_token = x.abs().amax(-1)
            peaks = peaks.scatter_reduce(0, rows[:, None].expand_as(of_token), of_token, "amax")
        scale = (peaks / LARGEST).float()
        each = scale.clamp_min(torch.finfo(torch.float32).tiny)[rows].repeat_interleave(x.shape[1] // kv_heads, 1)
        codes.append((x / each[..., None]).clamp(-LARGEST, LARGEST).to(CODES))
        scales.append(scale)
    return [*codes, torch.stack(scales)]


def _bound(weights: Sequence[Tensor], x: Tensor, kv_heads: int, norm: str) -> Tensor:
    """Of each key head's group, [K] or [1]."""
    most: Tensor = torch.stack([weight.to(x.dtype).abs() for weight in weights]).amax(0)
    channels = x.shape[2] * (x.shape[1] if norm == "rms_across" else 1)
    bound: Tensor = most.view(1 if norm == "rms" else kv_heads, -1).amax(-1) * channels**0.5
    return bound


def _code_heads_fake(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor | None,
    place: Sequence[Tensor],
    cu: Tensor,
    norm: str,
    pairs: str,
    eps: float,
) -> list[Tensor]:
    _check(v, cu, norm)
    tokens = sum(x.shape[0] for x in q)
    codes = [x[0].new_empty(tokens, *x[0].shape[1:], dtype=CODES) for x in (q, k, v)]
    return [*codes, q[0].new_empty(3, cu.shape[0] - 1, k[0].shape[1], dtype=torch.float32)]


def _check(v: Sequence[Tensor], cu: Tensor, norm: str) -> None:
    torch._check(len(v) > 0, lambda: "qk_norm_rope: codes are made of q, k and v, and there is no v")
    torch._check(
        norm in NORMS,
        lambda: f"qk_norm_rope: codes with a scale for each row need a norm that bounds q and k, got {norm}",
    )
    torch._check(
        cu.dtype == torch.int32 and cu.dim() == 1 and cu.shape[0] > 0,
        lambda: "qk_norm_rope: cu must be int32 [R + 1] beside q",
    )


_code_heads = declare(
    "qk_norm_rope_code_heads(Tensor[] q, Tensor[] k, Tensor[] v, Tensor[] weights, Tensor? table, Tensor[] place, "
    "Tensor cu, str norm, str pairs, float eps) -> Tensor[]",
    reference=qk_norm_rope_code_heads_reference,
    fake=_code_heads_fake,
)
