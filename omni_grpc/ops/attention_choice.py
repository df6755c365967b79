"""Which of the ways to compute an attention is the fastest for rows like the given ones, by the times of `ops.tuning`.

Times hang on dtype, heads, whether it is causal, how many rows there are and whether they are alike, and on the tokens
of a row, which is the size. Rows count by powers of two, as do keys of a cross attention. What is measured is made up
of that alone, so the same shape is the same measurement everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pkgutil
from collections.abc import Mapping

import torch
from torch import Tensor

from omni_grpc.config.backends import APART, run_of
from omni_grpc.ops.attention_kernels import Offsets
from omni_grpc.ops.heads import CODES, quantize_heads
from omni_grpc.ops.tuning import Call, Shape, choices

OP = "attention"
CODED_DTYPE = str(CODES).removeprefix("torch.")
MOST_CALLS = 8
"""Runs of rows for which one call each is considered: the host is slower than the device where there are more."""
MOST_FLOPS = 4e13
"""Of one call: what takes longer, about a tenth of a second on an H100, is not measured at a start."""
SPREAD = 0.4
"""Rows that are not alike are measured with lengths from so much below to so much above their mean."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How many, whether they are all alike, and the tokens and keys of one, on average."""

    count: int
    like: bool
    tokens: int
    keys: int


def fastest(ways: tuple[str, ...], rows: Rows, q: Tensor, kv_heads: int, causal: bool) -> str:
    """Of the ways to compute attention of these rows. Where no times are near it is the first; rows that are all alike
    are one call in a form of their own, if there is one.
    """
    if q.device.type != "cuda":
        return ways[0]
    if not rows.like and rows.count > MOST_CALLS:
        ways = tuple(way for way in ways if not way.endswith(APART))
    if len(ways) == 1:
        return ways[0]
    dtype = str(q.dtype).removeprefix("torch.")
    shape = shape_of(rows, dtype, q.shape[1], kv_heads, q.shape[2], causal)
    measurable = 4.0 * rows.count * rows.tokens * rows.keys * q.shape[1] * q.shape[2] <= MOST_FLOPS
    candidates = functools.partial(operands, ways=ways) if measurable else None
    likely = ways[1] if rows.like and ways[1].endswith(APART) else ways[0]
    return choices(q.device).of(shape, frozenset(ways), candidates) or likely


@functools.lru_cache(maxsize=4096)
def shape_of(rows: Rows, dtype: str, heads: int, kv_heads: int, size: int, causal: bool) -> Shape:
    """Where it looks for times."""
    power = rows.count.bit_length() - 1
    alike = "one" if rows.count == 1 else f"{'like' if rows.like else 'unlike'}{2**power}"
    keys = "self" if rows.keys == rows.tokens else f"keys{2 ** (max(1, rows.keys).bit_length() - 1)}"
    kind = (dtype, f"{heads}x{kv_heads}x{size}", "causal" if causal else "full", alike, keys)
    return Shape(OP, kind, max(1, rows.tokens))


def taken(ways: tuple[str, ...], device: torch.device, dtype: str, heads: str, causal: bool) -> list[str]:
    """Backends that `fastest` may take for such heads ("24x24x128"), each once: where no times are near, the first."""
    found = [ways[0]]
    if device.type == "cuda" and len(ways) > 1:
        kind = (dtype, heads, "causal" if causal else "full")
        known = choices(device).winners(OP, kind, frozenset(ways))
        found = sorted(known, key=ways.index) or found
    return list(dict.fromkeys(way.partition(" ")[0] for way in found))


def operands(shape: Shape, device: torch.device, ways: tuple[str, ...]) -> Mapping[str, Call]:
    """Rows of a shape, and a call for each way."""
    dtype, heads_of, masked, alike, keyed = map(str, shape.kind)
    heads, kv_heads, size = map(int, heads_of.split("x"))
    queries = lengths(alike, shape.size)
    keys = queries if keyed == "self" else lengths(alike, int(keyed.removeprefix("keys")))
    coded = dtype == CODED_DTYPE
    made = torch.bfloat16 if coded else getattr(torch, dtype)
    q, k, v = (
        torch.randn(sum(rows), n, size, device=device, dtype=torch.float32).to(made)
        for rows, n in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    host_q, host_k = (torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32) for rows in (queries, keys))
    offsets = Offsets(
        cu_q=host_q.to(device),
        cu_k=host_k.to(device),
        longest_q=max(queries),
        longest_k=max(keys),
        host_q=host_q,
        host_k=host_k,
    )

    given: tuple[object, ...] = (q, k, v)
    if coded:
        given = (quantize_heads(q, k, v, offsets.cu_q, offsets.cu_k, offsets.longest_q, offsets.longest_k),)

    def call(way: str) -> Tensor:
        out: Tensor = function(run_of(way, coded))(*given, offsets, size**-0.5, masked == "causal")
        return out.contiguous()

    return {way: functools.partial(call, way) for way in ways}


def lengths(alike: str, tokens: int) -> list[int]:
    """Of rows with so many tokens on average: "one", "like4", "unlike4"."""
    if alike == "one":
        return [tokens]
    like = alike.startswith("like")
    count = int(alike.removeprefix("like" if like else "unlike"))
    if like:
        return [tokens] * count
    step = 2 * SPREAD * tokens / (count - 1) if count > 1 else 0
    return [max(1, round((1 - SPREAD) * tokens + row * step)) for row in range(count)]


function = functools.cache(pkgutil.resolve_name)
"""What an import string of `backends` names, looked up once."""
