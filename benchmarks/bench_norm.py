"""Times norm_modulate against what it replaces, eager torch and torch.compile, and against a copy: the ceiling.

    python benchmarks/bench_norm.py             the GPU where there is one, else the CPU
    python benchmarks/bench_norm.py --device cpu

On a GPU a measurement is a CUDA graph of CALLS calls, timed with events: the device's time alone, without the host's.
The inputs rotate through more memory than the L2 cache holds, and every call has an output of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omni_grpc.ops.norm import norm_modulate

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Call = Callable[..., Tensor]

GPU_SHAPES = ((4608, 3072), (9216, 3072), (32760, 5120))
"""FLUX and Qwen-Image at 1024 x 1024 (one row, two rows), Wan 2.2 14B at 480p and 81 frames."""

CPU_SHAPES = ((1024, 1536), (4608, 3072))
CALLS = 20
REPEATS = 15
BEYOND_L2 = 256 * 2**20
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb_per_s` counts each input read once and the output written once. `problem` says why there is no time."""

    tokens: int
    channels: int
    rows: int
    dtype: str
    what: str
    microseconds: float | None
    gb_per_s: float | None
    problem: str = ""


def eager(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor) -> Tensor:
    """Model code without the op: a packed batch gathers the modulation, a single row broadcasts it."""
    if scale.shape[0] > 1:
        scale, shift = scale.index_select(0, index), shift.index_select(0, index)
    return F.layer_norm(x, (x.shape[1],), eps=EPS) * (1 + scale) + shift


def kernel(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor) -> Tensor:
    return norm_modulate(x, scale, shift, index, EPS)


def copy(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor) -> Tensor:
    return x.clone()


def measure(
    device: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every candidate at every shape, for one modulation row and for two. Nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    compiled = torch.compile(eager, dynamic=False, fullgraph=True)
    candidates: dict[str, Call] = {"copy": copy, "eager": eager, "compile": compiled, "kernel": kernel}
    measurements = []
    for (tokens, channels), rows in itertools.product(shapes, (1, 2)):
        sets = _input_sets(device, tokens, channels, rows, dtype)
        x, scale, shift, index = sets[0]
        moved = 2 * x.nbytes + scale.nbytes + shift.nbytes + (index.nbytes if rows > 1 else 0)
        for what, call in candidates.items():
            taken, problem = None, "no time left"
            if time.monotonic() < deadline:
                taken, problem = _try(_time_on_gpu if device == "cuda" else _time_on_cpu, call, sets)
            measurements.append(
                Measurement(
                    tokens=tokens,
                    channels=channels,
                    rows=rows,
                    dtype=str(dtype).removeprefix("torch."),
                    what=what,
                    microseconds=None if taken is None else taken * 1e6,
                    gb_per_s=None if taken is None else moved / taken / 1e9,
                    problem=problem,
                )
            )
        del sets, x, scale, shift, index
    return measurements


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def _input_sets(device: str, tokens: int, channels: int, rows: int, dtype: torch.dtype) -> list[Inputs]:
    count = max(2, math.ceil(BEYOND_L2 / (tokens * channels * dtype.itemsize))) if device == "cuda" else 1
    index = (torch.arange(tokens, device=device) * rows // tokens).int()
    return [
        (
            torch.randn(tokens, channels, device=device).to(dtype),
            # as models have them: slices of one row of six vectors
            *torch.randn(rows, 6 * channels, device=device).to(dtype).chunk(6, -1)[:2],
            index,
        )
        for _ in range(count)
    ]


def _try(timer: Callable[[Call, list[Inputs]], float], call: Call, sets: list[Inputs]) -> tuple[float | None, str]:
    try:
        return timer(call, sets), ""
    except Exception as error:  # noqa: BLE001 - torch.compile fails in many ways, and the other rows still count
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _time_on_gpu(call: Call, sets: list[Inputs]) -> float:
    """Seconds of one call, the median of REPEATS replays of a graph of CALLS."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for inputs in sets[:2]:
            call(*inputs)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(*sets[i % len(sets)]) for i in range(CALLS)]
    times = []
    for _ in range(REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    del outputs, graph
    return statistics.median(times[3:])


def _time_on_cpu(call: Call, sets: list[Inputs]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call(*sets[0])
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def table(measurements: Sequence[Measurement]) -> str:
    """A row for each shape and candidate; `speedup` is eager's time over this one's."""
    lines = [f"{'shape':>12} {'rows':>4} {'dtype':>8}  {'what':8} {'us':>9} {'GB/s':>7} {'of copy':>8} {'speedup':>8}"]
    for _, group in itertools.groupby(measurements, lambda m: (m.tokens, m.channels, m.rows)):
        by_name = {m.what: m for m in group}
        for m in by_name.values():
            head = f"{f'{m.tokens}x{m.channels}':>12} {m.rows:>4} {m.dtype:>8}  {m.what:8}"
            if m.microseconds is None or m.gb_per_s is None:
                lines.append(f"{head} {m.problem}")
                continue
            ceiling, base = by_name["copy"].gb_per_s, by_name["eager"].microseconds
            of_copy = f"{m.gb_per_s / ceiling:8.0%}" if ceiling else f"{'-':>8}"
            speedup = f"{base / m.microseconds:7.2f}x" if base else f"{'-':>8}"
            lines.append(f"{head} {m.microseconds:9.1f} {m.gb_per_s:7.0f} {of_copy} {speedup}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time norm_modulate against eager torch and torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        print(table(measure(device, GPU_SHAPES if device == "cuda" else CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
