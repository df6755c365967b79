"""Times 8-bit attention against bfloat16 attention in the same run, and measures what it costs in accuracy.

    python benchmarks/bench_attention_q.py

A measurement is a CUDA graph of calls, timed with events. "together" and "apart" are the plans of the attention alone,
whose operands are in 8 bits already; "codes" is making them from bfloat16 in a pass of its own, "with codes" both.
"normed" is what models have before attention: norms of heads and turns of queries and keys, in bfloat16 or with codes
made in the same pass, and that with the attention after it. Errors are those of 256 queries of 4 heads against
attention in float32, on normal data, or on what the shape's name says.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import require_gpu
from omni_grpc.config.backends import BACKENDS, lack
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.attention import use_of, varlen_attention
from omni_grpc.ops.attention_q import HEAD_SIZE, PLANS, attention_q, attention_quantize
from omni_grpc.ops.rope import Heads, qk_norm_rope
from omni_grpc.ops.rope_tiles import qk_norm_rope_quantize_tiles

SCALE = HEAD_SIZE**-0.5
MOST_CALLS, LEAST_REPEATS, MOST_REPEATS = 20, 3, 9
SECONDS_EACH = 0.12
PASSES = ("codes", "normed bf16", "normed codes")
QUERIES, HEADS = 256, 4
"""Of what the error is measured on."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens of each row and heads. `data` is normal but for outliers in channels that it names."""

    name: str
    rows: tuple[int, ...]
    heads: int
    data: str = "normal"

    @property
    def flops(self) -> float:
        return 4.0 * sum(n * n for n in self.rows) * self.heads * HEAD_SIZE


SHAPES = (
    Shape("4.6k", (4608,), 24),
    Shape("32k", (32760,), 40),
    Shape("1.5k", (1536,), 24),
    Shape("9k", (9216,), 24),
    Shape("mixture", (4608, 1300, 2500, 4096, 1100, 4608), 24),
    Shape("key bias", (4608,), 24, "key bias"),
    Shape("query outliers", (4608,), 24, "query outliers"),
    Shape("value outliers", (4608,), 24, "value outliers"),
    Shape("32k, 24 heads", (32760,), 24),
    Shape("75k", (75600,), 40),
)
"""FLUX or Qwen-Image, Wan at 480p, small images, two mid-sized ones, requests of unlike sizes, Wan at 720p."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`error` is relative, over all that was compared. `problem` says why there is no time."""

    shape: str
    heads: int
    tokens: int
    rows: int
    what: str
    microseconds: float | None
    tflop_per_s: float | None
    error: float | None = None
    cosine: float | None = None
    problem: str = ""


def gpu(seconds: float) -> list[Measurement]:
    deadline = time.monotonic() + seconds
    made: list[Measurement] = []
    for shape in SHAPES:
        if time.monotonic() < deadline:
            made += measure(shape)
            torch.cuda.empty_cache()
    return made


def measure(shape: Shape, plans: Sequence[str] = PLANS) -> Iterator[Measurement]:
    q, k, v = drawn(shape)
    host = torch.tensor([*itertools.accumulate(shape.rows, initial=0)], dtype=torch.int32)
    cu, longest, tokens = host.cuda(), max(shape.rows), sum(shape.rows)
    true = exact(q, k, v, shape.rows[0])
    coded = attention_quantize(q, k, v, cu, cu)
    calls = {**_baselines(q, k, v, cu, host, longest, len(shape.rows) == 1)}
    bf16 = next(iter(calls), "")
    for plan in plans:
        calls[plan] = lambda plan=plan: attention_q(coded, cu, cu, tokens, SCALE, plan)  # type: ignore[misc]
    calls["codes"] = lambda: attention_quantize(q, k, v, cu, cu)[0]
    calls["with codes"] = lambda: attention_q(attention_quantize(q, k, v, cu, cu), cu, cu, tokens, SCALE)
    weight = torch.ones(HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(tokens, HEAD_SIZE // 2, device="cuda")
    table, heads = torch.stack([angles.cos(), angles.sin()], -1), [Heads(q, k, v, (weight, weight))]
    calls["normed bf16"] = lambda: qk_norm_rope(heads, table, norm="rms")[0]
    calls["normed codes"] = lambda: qk_norm_rope_quantize_tiles(heads, table, (), cu, norm="rms")[0]
    if bf16:
        after = _baselines(*qk_norm_rope(heads, table, norm="rms"), cu, host, longest, len(shape.rows) == 1)[bf16]
        calls[f"normed, {bf16}"] = lambda: (qk_norm_rope(heads, table, norm="rms"), after())[1]
    calls["normed, with codes"] = lambda: attention_q(
        qk_norm_rope_quantize_tiles(heads, table, (), cu, norm="rms"), cu, cu, tokens, SCALE
    )
    for what, call in calls.items():
        error = cosine = None
        try:
            if "normed" not in what and what != "codes":
                error, cosine = apart(call(), true)
            taken, problem = seconds_of(call), ""
        except Exception as failure:  # noqa: BLE001 - one that fails says so, and the others still count
            taken, problem = None, f"{type(failure).__name__}: {str(failure)[:90]}"
        yield Measurement(
            shape=shape.name,
            heads=shape.heads,
            tokens=tokens,
            rows=len(shape.rows),
            what=what,
            microseconds=None if taken is None else taken * 1e6,
            tflop_per_s=None if taken is None or what in PASSES else shape.flops / taken / 1e12,
            error=error,
            cosine=cosine,
            problem=problem,
        )


def _baselines(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, host: Tensor, longest: int, one_row: bool
) -> dict[str, Callable[[], Tensor]]:
    """Of bfloat16, the fastest one first."""
    calls: dict[str, Callable[[], Tensor]] = {}
    if one_row and importlib.util.find_spec("fa3_fwd_interface") is not None:
        from fa3_fwd_interface import flash_attn_func  # a package that may be missing

        calls["fa3 bf16"] = lambda: flash_attn_func(q[None], k[None], v[None], softmax_scale=SCALE)[0]
    use = use_of(q.device, q.dtype, HEAD_SIZE, causal=False, grouped=False)
    for name in ("FLASH_ATTN_3", "CUDNN_ATTN"):
        if (not calls or name == "CUDNN_ATTN") and not lack(BACKENDS[name], use):
            calls[f"{name} bf16"] = lambda name=name: varlen_attention(  # type: ignore[misc]
                q, k, v, cu, cu, longest, longest, SCALE, False, name, host, host
            )
    return calls


def drawn(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    size = (sum(shape.rows), shape.heads, HEAD_SIZE)
    q, k, v = (torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3))
    outliers = slice(0, 4)
    if shape.data == "key bias":
        k[..., outliers] += 10
    elif shape.data == "query outliers":
        q[..., outliers] *= 5
    elif shape.data == "value outliers":
        v[..., outliers] *= 30
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, row: int) -> Tensor:
    """[QUERIES, HEADS, D] of the first row, in float32."""
    q, k, v = (x[:n, :HEADS].float() for x, n in ((q, QUERIES), (k, row), (v, row)))
    weights = (SCALE * torch.einsum("nhd,mhd->hnm", q, k)).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def apart(out: Tensor, true: Tensor) -> tuple[float, float]:
    """Relative error and cosine."""
    mine = out[:QUERIES, :HEADS].double()
    error = (mine - true).norm() / true.double().norm()
    return error.item(), torch.cosine_similarity(mine.flatten(), true.double().flatten(), 0).item()


def seconds_of(call: Callable[[], Tensor]) -> float:
    """Seconds of one call, the median over replays of a graph of several."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
    torch.cuda.current_stream().wait_stream(warm)
    end.synchronize()
    about = start.elapsed_time(end) / 1e3
    calls = max(1, min(MOST_CALLS, int(0.05 / about)))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(SECONDS_EACH / (about * calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def table(measurements: Sequence[Measurement]) -> str:
    columns = f"{'shape':>14} {'rows':>4} {'tokens':>6} {'heads':>5}  {'what':24} {'us':>9} {'TFLOP/s':>7}"
    lines = [f"{columns} {'error':>8} cosine"]
    for m in measurements:
        start = f"{m.shape:>14} {m.rows:>4} {m.tokens:>6} {m.heads:>5}  {m.what:24}"
        time_taken = m.problem if m.microseconds is None else f"{m.microseconds:9.1f}"
        rate = f"{'':>7}" if m.tflop_per_s is None else f"{m.tflop_per_s:7.0f}"
        close = "" if m.error is None or m.cosine is None else f"{m.error:8.4f} {m.cosine:.6f}"
        lines.append(f"{start} {time_taken} {rate} {close}")
    return "\n".join(lines)


def main() -> None:
    Parser(description="time 8-bit attention on a Hopper GPU").parse_args()
    require_gpu()
    print(table(gpu(math.inf)))


if __name__ == "__main__":
    main()
