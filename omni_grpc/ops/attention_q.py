"""8-bit attention over packed rows: int8 scores, e4m3 weights and values, everything else in float32.

As in SageAttention 2 (https://arxiv.org/abs/2411.10958): a vector is taken from the keys of a row and head, which
softmax does not see, before they become int8; weights and values are e4m3, whose relative error of 2^-4 at most makes
nearly all of the result's. Rows do not see each other, to the bit.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D = 128 channels, R rows. Operands lie
in tiles as csrc/common/attention_q.h says, Q = Tq // 64 + R tiles of queries and N = Tk // 128 + R of keys: row r has
its first one at cu[r] // size + r. What is in tiles, or parts of them, that no row reaches is not defined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.declare import Size, op
from omni_grpc.ops.packed import check_packed

HEAD_SIZE = 128
TILE_QUERIES, TILE_KEYS = 64, 128
LEAST_AMAX = 1e-30
"""What is smaller counts as zero: the inverse of its scale would not be finite."""
CENTRE_SAMPLES = 64
WEIGHT = 8.0
"""Weights are e4m3 times 2 to this."""
PLANS = ("together", "turns", "apart")
"""Of the kernel: what all tiles of keys give is added up on the tensor cores, which have few bits for it, or apart, in
float32 tile by tile; what that changes is far below what 8 bits do. "turns" is "together" with warpgroups that start
their products in turns.
"""
_INT8, _E4M3 = 127.0, 448.0
_LOG2_E = 1.44269504


class QuantizedTiles(NamedTuple):
    """What `attention_quantize` gives: q int8 [H, Q, 64, D] with a scale for each query [H, Q, 64], k int8 [K, N, 128,
    D] and v e4m3 [K, N, D, 128] with a scale for each tile [K, N], of v a power of 2.
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


def attention_quantize(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> QuantizedTiles:
    """The operands of `attention_q`. q: [Tq, H, D]. k, v: [Tk, K, D]. cu_q, cu_k: int32 [R + 1]. bfloat16 on CUDA.

    What is taken from the keys of a row and head is the mean of 64 of them, spread over the row. A NaN in a query or
    key is one in its scale, one in a value stays one in v. Raises RuntimeError for other head sizes.
    """
    return QuantizedTiles(*attention_quantize_op.overload(q, k, v, cu_q, cu_k))


def attention_q(
    quantized: QuantizedTiles, cu_q: Tensor, cu_k: Tensor, queries: int, scale: float, plan: str = PLANS[0]
) -> Tensor:
    """softmax(scale * q k^T) v, each row's queries to its keys; `queries` is Tq. Returns bfloat16 [Tq, H, D].

    Not causal. A row without keys gives zeros. `scale` is above 0. On CUDA it needs compute capability 9.0.
    """
    out: Tensor = attention_q_op.overload(*quantized, cu_q, cu_k, queries, scale, plan)
    return out


def attention_quantize_fake(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> list[Tensor]:
    """Empty tensors with the shapes and dtypes of QuantizedTiles, for q [Tq, H, D], k and v [Tk, K, D]."""
    _check_inputs(q, k, v, cu_q, cu_k)
    rows, heads, kv_heads = cu_q.shape[0] - 1, q.shape[1], k.shape[1]
    tiles_q, tiles_k = q.shape[0] // TILE_QUERIES + rows, k.shape[0] // TILE_KEYS + rows
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((heads, tiles_q, TILE_QUERIES, HEAD_SIZE), torch.int8),
        ((heads, tiles_q, TILE_QUERIES), torch.float32),
        ((kv_heads, tiles_k, TILE_KEYS, HEAD_SIZE), torch.int8),
        ((kv_heads, tiles_k), torch.float32),
        ((kv_heads, tiles_k, HEAD_SIZE, TILE_KEYS), torch.float8_e4m3fn),
        ((kv_heads, tiles_k), torch.float32),
    ]
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


@op(fake=attention_quantize_fake)
def attention_quantize_op(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> list[Tensor]:
    """`attention_quantize` of q [Tq, H, D], k and v [Tk, K, D]: the parts of QuantizedTiles, in order."""
    _check_inputs(q, k, v, cu_q, cu_k)
    q, k, v = q.float(), k.float(), v.float()
    at_q, at_k = cu_q.tolist(), cu_k.tolist()
    centred = torch.zeros_like(k)
    for start, end in itertools.pairwise(at_k):
        if end > start:
            mean = k[start + _samples(end - start, k.device)].sum(0) / CENTRE_SAMPLES
            centred[start:end] = k[start:end] - mean
    tiles_q, tiles_k, tiles_v = (
        _in_tiles(x, at, size)
        for x, at, size in ((q, at_q, TILE_QUERIES), (centred, at_k, TILE_KEYS), (v, at_k, TILE_KEYS))
    )
    q_scale, k_scale = _scale(tiles_q.abs().amax(-1)), _scale(tiles_k.abs().amax((-2, -1)))
    v_scale = _power_of_2(tiles_v.abs().nan_to_num(0.0, float("inf")).amax((-2, -1)).clamp_min(LEAST_AMAX) / _E4M3)
    codes_q, codes_k = (
        (tile / scale).nan_to_num().round().clamp(-_INT8, _INT8).to(torch.int8)
        for tile, scale in ((tiles_q, q_scale[..., None]), (tiles_k, k_scale[..., None, None]))
    )
    codes_v = (tiles_v / v_scale[..., None, None]).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
    lines = _by_weights(codes_v.view(torch.uint8).transpose(-1, -2))
    parts = (_swizzled(codes_q), q_scale, _swizzled(codes_k), k_scale, _swizzled(lines), v_scale)
    quantized = QuantizedTiles(*(part.contiguous() for part in parts))
    return [*quantized._replace(v=quantized.v.view(torch.float8_e4m3fn))]


def _fake(q: Tensor, *rest: Any) -> Tensor:
    *parts, cu_q, cu_k, queries, scale, plan = rest
    _check_quantized(QuantizedTiles(q, *parts), cu_q, cu_k, queries, scale, plan)
    return q.new_empty((queries, q.shape[0], HEAD_SIZE), dtype=torch.bfloat16)


@op(fake=_fake)
def attention_q_op(
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    queries: Size,
    scale: float,
    plan: str,
) -> Tensor:
    """`attention_q` of the parts of QuantizedTiles -> bfloat16 [queries, H, D]. Goes through the keys tile by tile, the
    last, possibly partial tile first.
    """
    _check_quantized(QuantizedTiles(q, q_scale, k, k_scale, v, v_scale), cu_q, cu_k, queries, scale, plan)
    heads, group = q.shape[0], q.shape[0] // k.shape[0]
    lines_q, lines_k = _swizzled(q).float(), _swizzled(k).float()
    lines_v = _by_keys(_swizzled(v.view(torch.uint8))).view(torch.float8_e4m3fn).float().transpose(-1, -2)
    out = torch.zeros(queries, heads, HEAD_SIZE, dtype=torch.float32, device=q.device)
    for start, n, m, first_q, first_k in _rows(cu_q, cu_k):
        if n == 0 or m == 0:
            continue
        row_q = lines_q.flatten(1, 2)[:, first_q * TILE_QUERIES :][:, :n]
        factor = q_scale.flatten(1)[:, first_q * TILE_QUERIES :][:, :n] * scale * _LOG2_E
        most = torch.full((heads, n), float("-inf"), device=q.device)
        total, made = torch.zeros_like(most), torch.zeros_like(row_q)
        last = (m - 1) // TILE_KEYS
        for number in (last, *range(last)):
            at, there = first_k + number, min(TILE_KEYS, m - number * TILE_KEYS)
            tile_k, tile_v, of_k, of_v = (
                x[:, at].repeat_interleave(group, 0) for x in (lines_k, lines_v, k_scale, v_scale)
            )
            scores = (row_q @ tile_k[:, :there].transpose(1, 2)) * (factor * of_k[:, None])[..., None]
            now = torch.maximum(most, scores.amax(-1))
            decay, weights = torch.exp2(most - now), torch.exp2(scores - now[..., None] + WEIGHT)
            total = total * decay + weights.sum(-1)
            rounded = weights.clamp(max=_E4M3).to(torch.float8_e4m3fn).float()
            made = made * decay[..., None] + (rounded @ tile_v[:, :there]) * of_v[:, None, None]
            most = now
        out[start : start + n] = (made / total[..., None]).transpose(0, 1)
    return out.bfloat16()


def _rows(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """(first query, queries, keys, first tile of queries, of keys) of each row."""
    at_q, at_k = cu_q.tolist(), cu_k.tolist()
    for row, (start_q, start_k) in enumerate(zip(at_q[:-1], at_k[:-1], strict=True)):
        first_q, first_k = start_q // TILE_QUERIES + row, start_k // TILE_KEYS + row
        yield start_q, at_q[row + 1] - start_q, at_k[row + 1] - start_k, first_q, first_k


def _samples(length: int, device: torch.device) -> Tensor:
    """Tokens of a row that its centre is made of: one of each of equal parts, at places that differ by part, since a
    grid of pixels may have their period.
    """
    part = torch.arange(CENTRE_SAMPLES, device=device)
    start, end = part * length // CENTRE_SAMPLES, (part + 1) * length // CENTRE_SAMPLES
    places: Tensor = start + part * 37 % CENTRE_SAMPLES * (end - start) // CENTRE_SAMPLES
    return places


def _in_tiles(x: Tensor, at: Sequence[int], size: int) -> Tensor:
    """x [T, H, D] as [H, tiles, size, D], with zeros where there is no token."""
    tiles = x.new_zeros((x.shape[0] // size + len(at) - 1) * size, *x.shape[1:])
    for row, (start, end) in enumerate(itertools.pairwise(at)):
        first = (start // size + row) * size
        tiles[first : first + end - start] = x[start:end]
    made: Tensor = tiles.unflatten(0, (-1, size)).permute(2, 0, 1, 3)
    return made


def _scale(amax: Tensor) -> Tensor:
    return torch.where(amax < LEAST_AMAX, 1.0, amax / _INT8)


def _power_of_2(x: Tensor) -> Tensor:
    """The next one, of numbers above 0 in float32."""
    exponents: Tensor = (x.contiguous().view(torch.int32) + 0x7FFFFF) >> 23
    return (exponents << 23).view(torch.float32)


def _swizzled(lines: Tensor) -> Tensor:
    """Lines of 128 bytes with 16 bytes number c at c ^ (line % 8); the same again undoes it."""
    line = torch.arange(lines.shape[-2], device=lines.device)[:, None]
    chunk = torch.arange(8, device=lines.device) ^ line % 8
    moved: Tensor = lines.unflatten(-1, (8, 16))[..., line, chunk, :]
    return moved.flatten(-2)


def _by_weights(lines: Tensor) -> Tensor:
    """Keys along the last dimension in the order in which a thread has their weights."""
    groups: Tensor = lines.unflatten(-1, (-1, 2, 4, 2))
    return groups.transpose(-2, -3).flatten(-4)


def _by_keys(lines: Tensor) -> Tensor:
    groups: Tensor = lines.unflatten(-1, (-1, 4, 2, 2))
    return groups.transpose(-2, -3).flatten(-4)


def with_whole_heads(x: Tensor) -> Tensor:
    """x [T, H, D] with heads of 128 channels: smaller ones get zeros, which change no score."""
    return F.pad(x, (0, HEAD_SIZE - x.shape[2])) if x.shape[2] < HEAD_SIZE else x


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    op = "attention_quantize"
    check_packed(op, q, k, v, cu_q, cu_k)
    torch._check(q.shape[1] > 0, lambda: f"{op}: there are no query heads")
    torch._check(q.shape[2] == HEAD_SIZE, lambda: f"{op}: heads must have {HEAD_SIZE} channels, got {q.shape[2]}")
    _check_rows(op, q, cu_q, cu_k)


def _check_rows(op: str, q: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    torch._check(
        cu_q.dtype == torch.int32 and cu_k.dtype == torch.int32 and cu_q.dim() == 1 and cu_k.shape == cu_q.shape,
        lambda: f"{op}: cu_q and cu_k must be int32 and of the same length",
    )
    torch._check(cu_q.shape[0] > 0, lambda: f"{op}: cu_q is empty; it begins with 0")
    torch._check(
        cu_q.device == q.device and cu_k.device == q.device, lambda: f"{op}: all tensors must be on one device"
    )


def _check_quantized(
    quantized: QuantizedTiles, cu_q: Tensor, cu_k: Tensor, queries: int, scale: float, plan: str
) -> None:
    op, (q, k, v) = "attention_q", (quantized.q, quantized.k, quantized.v)
    rows = cu_q.shape[0] - 1
    torch._check(
        q.dtype == torch.int8 and k.dtype == torch.int8 and v.dtype == torch.float8_e4m3fn,
        lambda: f"{op}: q and k must be int8 and v float8_e4m3fn, got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    torch._check(
        q.dim() == 4 and q.shape[1:] == (queries // TILE_QUERIES + rows, TILE_QUERIES, HEAD_SIZE),
        lambda: (
            f"{op}: q is {tuple(q.shape)}, not what attention_quantize returns for {queries} queries in {rows} rows"
        ),
    )
    torch._check(
        k.dim() == 4 and v.shape == k.shape and k.shape[2:] == (TILE_KEYS, HEAD_SIZE),
        lambda: f"{op}: k is {tuple(k.shape)} and v {tuple(v.shape)}, not what attention_quantize returns",
    )
    torch._check(
        k.shape[0] > 0 and q.shape[0] > 0 and q.shape[0] % k.shape[0] == 0,
        lambda: f"{op}: {q.shape[0]} query heads are not a multiple of {k.shape[0]} key heads",
    )
    torch._check(
        quantized.q_scale.shape == q.shape[:3] and quantized.k_scale.shape == k.shape[:2] == quantized.v_scale.shape,
        lambda: f"{op}: the scales do not match the quantized values",
    )
    torch._check(scale > 0, lambda: f"{op}: scale must be above 0, got {scale}")
    torch._check(plan in PLANS, lambda: f"{op}: plan must be one of {', '.join(PLANS)}, got {plan}")
    _check_rows(op, q, cu_q, cu_k)
