"""Times compare_store against what it replaces, eager torch and torch.compile, and against a copy: the ceiling.

    python benchmarks/bench_cache.py             the GPU where there is one, else the CPU
    python benchmarks/bench_cache.py --device cpu

Measured as bench_norm measures. A batch of two rows; what is remembered is written in the same call, as a cache does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import BEYOND_L2, attempt, time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.cache import compare_store
from omni_grpc.ops.readback import read_back

Inputs = tuple[Tensor, Tensor, Tensor]

GPU_SHAPES = ((4608, 3072), (9216, 3072), (32760, 5120))
"""FLUX and Qwen-Image at 1024 x 1024 (one output, guided), Wan 2.2 14B at 480p and 81 frames."""

CPU_SHAPES = ((130, 128), (520, 128), (4608, 3072))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb_per_s` counts what is now read once, what was before read and written once; a copy is read and written."""

    tokens: int
    channels: int
    dtype: str
    what: str
    microseconds: float | None
    gb_per_s: float | None
    problem: str = ""


def eager(now: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """TeaCache's own code (https://github.com/ali-vilab/TeaCache), for two rows, whose signals it clones."""
    sums = []
    for x, before in zip(now.split([len(first), len(second)]), (first, second), strict=True):
        sums.append(torch.stack([(x - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)]))
        before.copy_(x)
    return torch.stack(sums)


def kernel(now: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return compare_store(now, [first, second], [0, len(first), len(now)], [True, True])


def copy(now: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return now.clone()


def tolist(now: Tensor, first: Tensor, second: Tensor) -> Any:
    return eager(now, first, second).tolist()


def decide(now: Tensor, first: Tensor, second: Tensor) -> Any:
    return read_back(kernel(now, first, second))


PASSES = (("copy", "kernel", "decide"), ("eager", "tolist"), ("compile",))
ORDER = ("copy", "eager", "compile", "kernel", "tolist", "decide")


def measure(
    device: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every candidate at every shape, and how long a decision takes: the kernel and the read of its sums. torch.compile
    comes last, as it takes longest: nothing new starts after `seconds`.
    """
    deadline = time.monotonic() + seconds
    made: dict[tuple[int, int, str], Measurement] = {}
    for names, shape in itertools.product(PASSES if device == "cuda" else PASSES[:2], shapes):
        if time.monotonic() > deadline:
            break
        sets = _input_sets(device, *shape, dtype)
        for what in names:
            made[(*shape, what)] = _measured(what, sets, dtype, deadline)
        del sets
    return [made[key] for key in ((*shape, what) for shape in shapes for what in ORDER) if key in made]


def _measured(what: str, sets: list[Inputs], dtype: torch.dtype, deadline: float) -> Measurement:
    now = sets[0][0]
    how: Callable[[Callable[..., Tensor], list[Inputs]], float] = time_on_gpu if now.is_cuda else time_on_cpu
    call: Callable[..., Any] = {"copy": copy, "kernel": kernel}.get(what, eager)
    if what == "compile":
        torch.compiler.reset()
        call = torch.compile(eager, dynamic=False, fullgraph=True)
    elif what in ("tolist", "decide"):
        how, call = _time_a_decision, decide if what == "decide" else tolist
    taken, problem = None, "no time left"
    if time.monotonic() < deadline:
        taken, problem = attempt(how, call, sets)
    moved = (2 if what == "copy" else 3) * now.nbytes
    return Measurement(
        tokens=now.shape[0],
        channels=now.shape[1],
        dtype=str(dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        gb_per_s=None if taken is None else moved / taken / 1e9,
        problem=problem,
    )


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def _input_sets(device: str, tokens: int, channels: int, dtype: torch.dtype) -> list[Inputs]:
    count = max(2, math.ceil(BEYOND_L2 / (tokens * channels * dtype.itemsize))) if device == "cuda" else 1
    half = tokens // 2
    return [
        (
            torch.randn(tokens, channels, device=device).to(dtype),
            torch.randn(half, channels, device=device).to(dtype),
            torch.randn(tokens - half, channels, device=device).to(dtype),
        )
        for _ in range(count)
    ]


def _time_a_decision(call: Callable[..., Tensor], sets: list[Inputs]) -> float:
    """Seconds from the first launch until the sums are on the host, the median of many: the host's time included."""
    times = []
    for number in range(23):
        inputs = sets[number % len(sets)]
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(*inputs)
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[10]


def table(measurements: Sequence[Measurement]) -> str:
    """A row for each shape and candidate; `speedup` is the time of eager torch over this one's, with the read (tolist)
    for `decide`.
    """
    lines = [f"{'shape':>12} {'dtype':>8}  {'what':8} {'us':>9} {'GB/s':>7} {'of copy':>8} {'speedup':>8}"]
    for _, group in itertools.groupby(measurements, lambda m: (m.tokens, m.channels, m.dtype)):
        by_name = {m.what: m for m in group}
        for m in by_name.values():
            head = f"{f'{m.tokens}x{m.channels}':>12} {m.dtype:>8}  {m.what:8}"
            if m.microseconds is None or m.gb_per_s is None:
                lines.append(f"{head} {m.problem}")
                continue
            ceiling = by_name["copy"].gb_per_s
            replaced = by_name.get("tolist" if m.what in ("tolist", "decide") else "eager")
            base = replaced.microseconds if replaced else None
            of_copy = f"{m.gb_per_s / ceiling:8.0%}" if ceiling else f"{'-':>8}"
            speedup = f"{base / m.microseconds:7.2f}x" if base else f"{'-':>8}"
            lines.append(f"{head} {m.microseconds:9.1f} {m.gb_per_s:7.0f} {of_copy} {speedup}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time compare_store against eager torch and torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        print(table(measure(device, GPU_SHAPES if device == "cuda" else CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
