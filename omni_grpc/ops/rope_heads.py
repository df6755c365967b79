"""From the projections' outputs to the inputs of fp8 attention: `ops.rope` and `ops.heads` in one pass.

The norm bounds queries and keys: their root mean square is 1 but for the norm's weights, and a rotation keeps lengths,
so no channel exceeds sqrt(channels) times the largest weight. That gives their scale without reading them. Since e4m3
is floating point, a scale that is too large costs no precision down to 2^-14 of it. Only v is read for its scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.ops.declare import op
from omni_grpc.ops.heads import FLOAT8, LARGEST, QuantizedHeads
from omni_grpc.ops.rope import Heads, RopeOperands, have_kernel_dtypes, joined, parts_of

NORMS = ("rms", "rms_across")


def qk_norm_rope_quantize_heads(
    streams: Sequence[Heads],
    table: Tensor | None,
    place: Sequence[Tensor],
    cu: Tensor,
    *,
    norm: str,
    pairs: str = "interleaved",
    eps: float = 1e-6,
) -> QuantizedHeads:
    """`ops.rope.qk_norm_rope`, quantized to e4m3 with a scale for each head of each row.

    cu: int32 [R + 1], the offsets of the rows in the result; each stream has its tokens in the order of the rows. norm:
    "rms" or "rms_across", without biases. Scales of v are those of `ops.heads.quantize_heads`, scales of q and k the
    norm's bound over 448, and 0 where a row has no tokens. Raises RuntimeError where shapes, dtypes or devices
    disagree.
    """
    q, k, v, weights, _ = parts_of(streams)
    return QuantizedHeads(*qk_norm_rope_quantize_heads_op(q, k, v, weights, table, list(place), cu, norm, pairs, eps))


def _have_kernel_dtypes(q: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor | None) -> bool:
    return have_kernel_dtypes(q, weights, (), table)


def _fake(*arguments: Any) -> list[Tensor]:
    q, k, v, _, _, _, cu, norm, *_ = arguments
    _check(v, cu, norm)
    tokens = sum(x.shape[0] for x in q)
    values = [x[0].new_empty(tokens, *x[0].shape[1:], dtype=FLOAT8) for x in (q, k, v)]
    return [*values, q[0].new_empty(3, cu.shape[0] - 1, k[0].shape[1], dtype=torch.float32)]


@op(kernel_if=_have_kernel_dtypes, of=("q", "weights", "table"), fake=_fake)
def qk_norm_rope_quantize_heads_op(
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
    """`qk_norm_rope_quantize_heads` of each stream's q [T_s, H, D], k, v [T_s, K, D]: the parts of QuantizedHeads."""
    _check(v, cu, norm)
    made = joined(RopeOperands(q, k, v, weights, [], table, place, norm, pairs, eps))
    kv_heads, count = k[0].shape[1], cu.shape[0] - 1
    rows = torch.arange(count, device=cu.device).repeat_interleave(cu.diff())
    values, scales = [], []
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
        values.append((x / each[..., None]).clamp(-LARGEST, LARGEST).to(FLOAT8))
        scales.append(scale)
    return [*values, torch.stack(scales)]


def _bound(weights: Sequence[Tensor], x: Tensor, kv_heads: int, norm: str) -> Tensor:
    """Of each key head's group, [K] or [1]."""
    most: Tensor = torch.stack([weight.to(x.dtype).abs() for weight in weights]).amax(0)
    channels = x.shape[2] * (x.shape[1] if norm == "rms_across" else 1)
    bound: Tensor = most.view(1 if norm == "rms" else kv_heads, -1).amax(-1) * channels**0.5
    return bound


def _check(v: Sequence[Tensor], cu: Tensor, norm: str) -> None:
    torch._check(len(v) > 0, lambda: "qk_norm_rope: quantization needs q, k and v, and v is missing")
    torch._check(
        norm in NORMS,
        lambda: f"qk_norm_rope: quantized heads need a norm of rms or rms_across, got {norm}",
    )
    torch._check(
        cu.dtype == torch.int32 and cu.dim() == 1 and cu.shape[0] > 0,
        lambda: "qk_norm_rope: cu must be int32 [R + 1], on the device of q",
    )
