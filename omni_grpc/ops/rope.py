"""The rope family: norms, rotary embeddings and the packing of streams, from projections to attention in one pass.

Shapes: T packed tokens, T_s of them in stream s; H query heads, K key/value heads (H is a multiple of K), D head size,
R <= D / 2 rotary pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, op
from omni_grpc.ops.quant import LARGEST

TABLE_DTYPES = frozenset({torch.float32, torch.float64})
MOST_STREAMS = 8
NORMS = ("none", "rms", "rms_across", "layer")
PAIRS = ("interleaved", "half")


class Heads(NamedTuple):
    """One stream's part of an attention.

    q: [T_s, H, D]. k, v: [T_s, K, D]. Views of a fused projection are welcome: only a token's own elements need be
    neighbours. weights, biases: of q's norm and of k's, none where there is none: [D] each, of "rms_across" [H * D] and
    [K * D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: tuple[Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()


class RopeOperands(NamedTuple):
    """The ops' parameters: tensors of each stream, weights and biases with q's and k's in turn."""

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    table: Tensor | None
    place: Sequence[Tensor]
    norm: str
    pairs: str
    eps: float


def qk_norm_rope(
    streams: Sequence[Heads],
    table: Tensor | None,
    place: Sequence[Tensor] = (),
    *,
    norm: str = "none",
    pairs: str = "interleaved",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms queries and keys, applies rotary embeddings (RoPE) and packs all streams into one order.

    table: [T, R, 2], cosine and sine of each position of the result; None rotates nothing. The rotated pairs are the
    channels (0, 1), (2, 3), ... ("interleaved"), or (0, R), (1, R + 1), ... ("half"); channels from 2R on pass.
    place: for each stream int32 [T_s], where its tokens go: every position once. Without, there is one stream, and its
    tokens stay where they are.
    norm: "rms" or "layer" over each head, "rms_across" over all heads of a token, "none".

    Returns q [T, H, D], k and v [T, K, D], contiguous and new, computed in float32 (float64 for float64) and rounded
    once; of one stream without `place`, v as it came. Raises RuntimeError where shapes, dtypes or devices disagree. A
    kernel serves float32 and bfloat16, the reference everything else. RMSNorm: https://arxiv.org/abs/1910.07467, of
    queries and keys: https://arxiv.org/abs/2302.05442, section 2; rotation: https://arxiv.org/abs/2104.09864,
    equation 34.
    """
    q, k, v, weights, biases = parts_of(streams)
    out = qk_norm_rope_op(q, k, v if place else [], weights, biases, table, list(place), norm, pairs, eps)
    return out[0], out[1], out[2] if place else streams[0].v


def qk_norm_rope_alone(
    streams: Sequence[Heads],
    table: Tensor | None,
    place: Sequence[Tensor] = (),
    *,
    norm: str = "none",
    pairs: str = "interleaved",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` without the values, which stay as they are: q [T, H, D] and k [T, K, D]."""
    q, k, _, weights, biases = parts_of(streams)
    out = qk_norm_rope_op(q, k, [], weights, biases, table, list(place), norm, pairs, eps)
    return out[0], out[1]


def qk_norm_rope_quantize(
    streams: Sequence[Heads],
    table: Tensor | None,
    place: Sequence[Tensor] = (),
    *,
    codes: torch.dtype,
    norm: str = "none",
    pairs: str = "interleaved",
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """`qk_norm_rope` in 8 bits: x is about value * scale, with one scale for each head of each token.

    codes: the dtype, torch.float8_e4m3fn or torch.int8. Returns q, k, v in it, then their scales, float32 [T, H],
    [T, K] and [T, K]: the head's largest magnitude over 448 or 127, and 1 where that is zero.
    """
    q, k, v, weights, biases = parts_of(streams)
    return tuple(qk_norm_rope_quantize_op(q, k, v, weights, biases, table, list(place), norm, pairs, eps, codes))


def have_kernel_dtypes(
    q: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], table: Tensor | None
) -> bool:
    """Whether kernels serve these dtypes: float32 and bfloat16, and for the table [T, R, 2] float32 alone."""
    for parts in (q, weights, biases):
        for x in parts:
            if x.dtype not in KERNEL_DTYPES:
                return False
    return table is None or table.dtype == torch.float32


@op(kernel_if=have_kernel_dtypes, of=("q", "weights", "biases", "table"))
def qk_norm_rope_op(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    table: Tensor | None,
    place: Sequence[Tensor],
    norm: str,
    pairs: str,
    eps: float,
) -> list[Tensor]:
    """`qk_norm_rope` of `RopeOperands`: q [T, H, D], k [T, K, D] and, where given, v [T, K, D]."""
    given = RopeOperands(q, k, v, weights, biases, table, place, norm, pairs, eps)
    _check(given)
    return [x.to(q[0].dtype) for x in joined(given)]


@op(kernel_if=have_kernel_dtypes, of=("q", "weights", "biases", "table"))
def qk_norm_rope_quantize_op(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    table: Tensor | None,
    place: Sequence[Tensor],
    norm: str,
    pairs: str,
    eps: float,
    codes: torch.dtype,
) -> list[Tensor]:
    """`qk_norm_rope_quantize` of `RopeOperands`: q [T, H, D], k and v [T, K, D] in `codes`, then their three scales."""
    given = RopeOperands(q, k, v, weights, biases, table, place, norm, pairs, eps)
    _check(given)
    torch._check(codes in LARGEST, lambda: f"qk_norm_rope: codes must be float8_e4m3fn or int8, got {codes}")
    torch._check(len(v) > 0, lambda: "qk_norm_rope: quantization needs q, k and v, and v is missing")
    most = LARGEST[codes]
    made, scales = [], []
    for x in joined(given):
        amax = x.abs().amax(-1)
        scale = torch.where(amax > 0, amax / most, 1.0)
        scaled = x / scale[..., None]
        made.append((scaled.round() if codes == torch.int8 else scaled).clamp(-most, most).to(codes))
        scales.append(scale.float())
    return [*made, *scales]


def parts_of(streams: Sequence[Heads]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """The streams' tensors as the op takes them: q, k, v, weights, biases."""
    return (
        [stream.q for stream in streams],
        [stream.k for stream in streams],
        [stream.v for stream in streams],
        [weight for stream in streams for weight in stream.weights],
        [bias for stream in streams for bias in stream.biases],
    )


def joined(given: RopeOperands) -> list[Tensor]:
    """q, k and, where given, v in the order of the result, in the dtype of the computation."""
    q, k, v, weights, biases, table, place, norm, pairs, eps = given
    math = torch.promote_types(q[0].dtype, torch.float32)
    made = []
    for which, streams in enumerate((q, k, v) if v else (q, k)):
        joint = streams[0].new_empty(sum(x.shape[0] for x in streams), *streams[0].shape[1:], dtype=math)
        for number, x in enumerate(streams):
            x = x.to(math)
            if which < 2:
                weight, bias = (part[2 * number + which].to(math) if part else None for part in (weights, biases))
                x = _normed(x, weight, bias, norm, eps)
                if table is not None:
                    x = _rotated(x, table.index_select(0, place[number]) if place else table, pairs)
            if place:
                joint[place[number]] = x
            else:
                joint.copy_(x)
        made.append(joint)
    return made


def _normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float) -> Tensor:
    if norm == "none":
        return x
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    whole = x.flatten(1) if norm == "rms_across" else x
    normed = F.rms_norm(whole, whole.shape[-1:], weight, eps)
    return (normed if bias is None else normed + bias).view(x.shape)


def _rotated(x: Tensor, table: Tensor, pairs: str) -> Tensor:
    """x [T, H, D] by table [T, R, 2]."""
    cos, sin = table[:, None].to(x.dtype).unbind(-1)
    count = table.shape[1]
    turning, rest = x[..., : 2 * count], x[..., 2 * count :]
    if pairs == "half":
        a, b = turning.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)


def _check(given: RopeOperands) -> None:
    q, k, v, weights, biases, table, place, norm, pairs, _ = given
    torch._check(norm in NORMS, lambda: f"qk_norm_rope: norm must be one of {', '.join(NORMS)}, got {norm}")
    torch._check(pairs in PAIRS, lambda: f"qk_norm_rope: pairs must be one of {', '.join(PAIRS)}, got {pairs}")
    count = len(q)
    torch._check(
        1 <= count <= MOST_STREAMS and len(k) == count and len(v) in (0, count),
        lambda: f"qk_norm_rope: q, k and v must be 1 to {MOST_STREAMS} streams, got {count}, {len(k)} and {len(v)}",
    )
    torch._check(
        len(place) == count or (count == 1 and not place),
        lambda: f"qk_norm_rope: place has {len(place)} entries for {count} streams",
    )
    _check_heads(q, k, v)
    for name, parts in (("weights", weights), ("biases", biases)):
        _check_affine(name, parts, q[0], k[0], count, norm)
    if weights and biases:
        torch._check(
            weights[0].dtype == biases[0].dtype, lambda: "qk_norm_rope: weights and biases must have the same dtype"
        )
    tokens = sum(x.shape[0] for x in q)
    if table is not None:
        torch._check(
            table.dim() == 3 and table.shape[2] == 2 and table.dtype in TABLE_DTYPES,
            lambda: f"qk_norm_rope: table must be float32 [T, R, 2], got {table.dtype} {tuple(table.shape)}",
        )
        torch._check(
            table.shape[0] == tokens, lambda: f"qk_norm_rope: table has {table.shape[0]} rows for {tokens} tokens"
        )
        torch._check(
            2 * table.shape[1] <= q[0].shape[2],
            lambda: f"qk_norm_rope: table has {table.shape[1]} pairs, heads have {q[0].shape[2]} channels",
        )
    for number, where in enumerate(place):
        torch._check(
            where.dtype == torch.int32 and where.dim() == 1 and where.shape[0] == q[number].shape[0],
            lambda where=where: f"qk_norm_rope: place must be int32 [T_s], got {where.dtype} {tuple(where.shape)}",
        )
    device = q[0].device
    rest = () if table is None else (table,)
    torch._check(
        all(x.device == device for x in (*q, *k, *v, *weights, *biases, *place, *rest)),
        lambda: "qk_norm_rope: all tensors must be on one device",
    )


def _check_heads(q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
    torch._check(
        all(x.dim() == 3 for x in (*q, *k, *v)),
        lambda: f"qk_norm_rope: q, k and v must be [T, H, D], got {[x.dim() for x in (*q, *k, *v)]} dimensions",
    )
    _, heads, size = q[0].shape
    kv_heads = k[0].shape[1]
    torch._check(
        heads > 0 and kv_heads > 0 and heads % kv_heads == 0,
        lambda: f"qk_norm_rope: {heads} query heads are not a multiple of {kv_heads} key heads",
    )
    for number, x in enumerate(q):
        torch._check(
            x.shape[1] == heads and x.shape[2] == size,
            lambda x=x: (
                f"qk_norm_rope: q is [T, {heads}, {size}] and {tuple(x.shape)}; all streams must have the same heads"
            ),
        )
        for name, other in (("k", k), ("v", v)):
            if other:
                y = other[number]
                torch._check(
                    y.shape[0] == x.shape[0] and y.shape[1] == kv_heads and y.shape[2] == size,
                    lambda x=x, y=y, name=name: (
                        f"qk_norm_rope: {name} must be {(x.shape[0], kv_heads, size)}, got {tuple(y.shape)}"
                    ),
                )
    torch._check(
        all(x.dtype == q[0].dtype for x in (*q, *k, *v)), lambda: "qk_norm_rope: q, k and v must have the same dtype"
    )


def _check_affine(name: str, parts: Sequence[Tensor], q: Tensor, k: Tensor, count: int, norm: str) -> None:
    if not parts:
        return
    torch._check(norm != "none", lambda: f"qk_norm_rope: {name} are given without a norm")
    torch._check(
        len(parts) == 2 * count,
        lambda: f"qk_norm_rope: {name} must be one for q and one for k of each of {count} streams, got {len(parts)}",
    )
    for number, part in enumerate(parts):
        x = (q, k)[number % 2]
        channels = x.shape[2] * (x.shape[1] if norm == "rms_across" else 1)
        torch._check(
            part.dim() == 1 and part.shape[0] == channels,
            lambda part=part, channels=channels: (
                f"qk_norm_rope: {name} must have {channels} channels, got {tuple(part.shape)}"
            ),
        )
    torch._check(
        all(part.dtype == parts[0].dtype for part in parts), lambda: f"qk_norm_rope: {name} must have the same dtype"
    )
