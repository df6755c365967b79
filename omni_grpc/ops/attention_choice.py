"""Chooses the attention kernel for a batch of rows by the times of `ops.tuning`.

Times depend on dtype, heads, causality, the number of rows and whether all have the same lengths, and on the tokens of
a row, which is the size. Rows are counted in powers of two, as are the keys of a cross attention. A measurement draws
its operands from that alone, so the same shape is the same measurement everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pkgutil
from collections.abc import Mapping

import torch
from torch import Tensor

from omni_grpc.config.backends import APART, kernel_for
from omni_grpc.ops.attention_kernels import Offsets
from omni_grpc.ops.heads import FLOAT8, quantize_heads
from omni_grpc.ops.tuning import Call, Shape, choices

OP = "attention"
QUANTIZED_DTYPE = str(FLOAT8).removeprefix("torch.")
MOST_CALLS = 8
"""Runs of rows up to which one call for each is considered: with more, the host is slower than the device."""
MOST_FLOPS = 4e13
"""Of one call. Longer ones, of about a tenth of a second on an H100, are not measured at start."""
SPREAD = 0.4
"""Rows of unequal lengths are measured with lengths from so much below to so much above their mean."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowSizes:
    """The number of rows, whether all have the same lengths, and the mean tokens and keys of a row."""

    count: int
    like: bool
    tokens: int
    keys: int


def fastest(kernels: tuple[str, ...], rows: RowSizes, q: Tensor, kv_heads: int, causal: bool) -> str:
    """The fastest kernel for these rows; of q [Tq, H, D], only shape, dtype and device are read. Without times of a
    similar shape it is the first, or for rows of equal lengths the second, if that is the first one's form with one
    call for each run of equal rows.
    """
    if q.device.type != "cuda":
        return kernels[0]
    if not rows.like and rows.count > MOST_CALLS:
        kernels = tuple(kernel for kernel in kernels if not kernel.endswith(APART))
    if len(kernels) == 1:
        return kernels[0]
    dtype = str(q.dtype).removeprefix("torch.")
    shape = shape_of(rows, dtype, q.shape[1], kv_heads, q.shape[2], causal)
    measurable = 4.0 * rows.count * rows.tokens * rows.keys * q.shape[1] * q.shape[2] <= MOST_FLOPS
    candidates = functools.partial(operands, kernels=kernels) if measurable else None
    likely = kernels[1] if rows.like and kernels[1].endswith(APART) else kernels[0]
    table = choices(q.device)
    kernel = table.of(shape, frozenset(kernels), candidates) or likely
    table.used.add((OP, kernel))
    return kernel


@functools.lru_cache(maxsize=4096)
def shape_of(rows: RowSizes, dtype: str, heads: int, kv_heads: int, size: int, causal: bool) -> Shape:
    """The key of its times."""
    power = rows.count.bit_length() - 1
    alike = "one" if rows.count == 1 else f"{'like' if rows.like else 'unlike'}{2**power}"
    keys = "self" if rows.keys == rows.tokens else f"keys{2 ** (max(1, rows.keys).bit_length() - 1)}"
    kind = (dtype, f"{heads}x{kv_heads}x{size}", "causal" if causal else "full", alike, keys)
    return Shape(OP, kind, max(1, rows.tokens))


def taken(kernels: tuple[str, ...], device: torch.device, dtype: str, heads: str, causal: bool) -> list[str]:
    """The backends that `fastest` may choose for such heads ("24x24x128"), each once; without times, the first."""
    found = [kernels[0]]
    if device.type == "cuda" and len(kernels) > 1:
        kind = (dtype, heads, "causal" if causal else "full")
        known = choices(device).winners(OP, kind, frozenset(kernels))
        found = sorted(known, key=kernels.index) or found
    return list(dict.fromkeys(kernel.partition(" ")[0] for kernel in found))


def operands(shape: Shape, device: torch.device, kernels: tuple[str, ...]) -> Mapping[str, Call]:
    """Operands of a shape, and a call for each kernel."""
    dtype, heads_of, masked, alike, keyed = map(str, shape.kind)
    heads, kv_heads, size = map(int, heads_of.split("x"))
    queries = lengths(alike, shape.size)
    keys = queries if keyed == "self" else lengths(alike, int(keyed.removeprefix("keys")))
    quantized = dtype == QUANTIZED_DTYPE
    made = torch.bfloat16 if quantized else getattr(torch, dtype)
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
    if quantized:
        given = (quantize_heads(q, k, v, offsets.cu_q, offsets.cu_k, offsets.longest_q, offsets.longest_k),)

    def call(kernel: str) -> Tensor:
        out: Tensor = function(kernel_for(kernel, quantized))(*given, offsets, size**-0.5, masked == "causal")
        return out.contiguous()

    return {kernel: functools.partial(call, kernel) for kernel in kernels}


def lengths(alike: str, tokens: int) -> list[int]:
    """The lengths of rows with so many tokens on average: "one", "like4", "unlike4"."""
    if alike == "one":
        return [tokens]
    like = alike.startswith("like")
    count = int(alike.removeprefix("like" if like else "unlike"))
    if like:
        return [tokens] * count
    step = 2 * SPREAD * tokens / (count - 1) if count > 1 else 0
    return [max(1, round((1 - SPREAD) * tokens + row * step)) for row in range(count)]


function = functools.cache(pkgutil.resolve_name)
"""The function that an import string of `backends` names, looked up once."""
