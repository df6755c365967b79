"""Times every attention backend that runs here, in TFLOP/s, at the shapes of models and over mixtures of rows.

    python benchmarks/bench_attention.py             the GPU where there is one, else the CPU
    python benchmarks/bench_attention.py --device cpu

On a GPU a call is timed with events around CALLS of them. On a CPU the shapes are those of a small model: what rows of
unlike lengths reach is to be compared with what as many of one length reach, which are one call of torch's attention,
and with the two matrix products alone, which no attention can beat.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omni_grpc.backends import BACKENDS, lack
from omni_grpc.ops.attention import use_of, varlen_attention

CALLS = 10
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one call is for: tokens of each row, heads and their size."""

    name: str
    rows: tuple[int, ...]
    heads: int
    size: int

    @property
    def flops(self) -> float:
        return 4.0 * sum(n * n for n in self.rows) * self.heads * self.size


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`problem` says why there is no time."""

    shape: str
    rows: int
    tokens: int
    dtype: str
    what: str
    microseconds: float | None
    tflop_per_s: float | None
    problem: str = ""


GPU_SHAPES = (
    Shape("1.5k", (1536,), 24, 128),
    Shape("4.6k", (4608,), 24, 128),
    Shape("9k", (9216,), 24, 128),
    Shape("32k", (32760,), 40, 128),
    Shape("75k", (75600,), 40, 128),
    Shape("4.6k twice", (4608,) * 2, 24, 128),
    Shape("mixture", (4608, 1300, 2500, 4096, 1100, 4608), 24, 128),
    Shape("head 64", (4250,), 38, 64),
)
"""FLUX, Qwen-Image, Wan at 480p and at 720p of 81 frames, requests of unlike sizes, Stable Diffusion 3."""


def drawn(rows: int) -> tuple[int, ...]:
    return tuple(random.Random(rows).randint(100, 300) for _ in range(rows))


CPU_SHAPES = tuple(
    shape
    for rows in (1, 4, 16, 64)
    for shape in (
        Shape(f"{rows} unlike", drawn(rows), 4, 32),
        Shape(f"{rows} like", (sum(drawn(rows)) // rows,) * rows, 4, 32),
    )
)


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def measure(
    device: str, shapes: Sequence[Shape], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every backend at every shape; nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    made = []
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        packed = torch.randn(sum(shape.rows), 3, shape.heads, shape.size, device=device).to(dtype)
        use = use_of(packed.device, dtype, shape.size, causal=False, grouped=False)
        for name, backend in BACKENDS.items():
            missing = lack(backend, use)
            taken, problem = (None, missing) if missing else _try(_attend(packed, shape, name), device, deadline)
            made.append(_measurement(shape, dtype, name, taken, problem))
        if device == "cpu":
            taken, problem = _try(_products(packed, shape), device, deadline)
            made.append(_measurement(shape, dtype, "products alone", taken, problem))
    return made


def _measurement(shape: Shape, dtype: torch.dtype, what: str, taken: float | None, problem: str) -> Measurement:
    return Measurement(
        shape=shape.name,
        rows=len(shape.rows),
        tokens=sum(shape.rows),
        dtype=str(dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        tflop_per_s=None if taken is None else shape.flops / taken / 1e12,
        problem=problem,
    )


def _attend(packed: Tensor, shape: Shape, backend: str) -> Callable[[], object]:
    q, k, v = packed.unbind(1)
    host = torch.tensor([*itertools.accumulate(shape.rows, initial=0)], dtype=torch.int32)
    cu, longest = host.to(packed.device), max(shape.rows)
    return lambda: varlen_attention(q, k, v, cu, cu, longest, longest, shape.size**-0.5, False, backend, host, host)


def _products(packed: Tensor, shape: Shape) -> Callable[[], object]:
    parts = [part.unbind(1) for part in packed.split(list(shape.rows))]
    heads = [tuple(x.transpose(0, 1) for x in part) for part in parts]
    return lambda: [q @ k.transpose(1, 2) @ v for q, k, v in heads]


def _try(call: Callable[[], object], device: str, deadline: float) -> tuple[float | None, str]:
    if time.monotonic() > deadline:
        return None, "no time left"
    try:
        return (_time_on_gpu if device == "cuda" else _time_on_cpu)(call), ""
    except Exception as error:  # noqa: BLE001 - one backend that fails says so, and the others still count
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _time_on_gpu(call: Callable[[], object]) -> float:
    """Seconds of one call, the median of REPEATS times CALLS of them."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def _time_on_cpu(call: Callable[[], object]) -> float:
    """Seconds of one call, the best of enough of them for 300 ms or REPEATS: others use this machine."""
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < 0.3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'shape':>12} {'rows':>4} {'tokens':>7} {'dtype':>8}  {'what':14} {'us':>10} {'TFLOP/s':>9}"]
    for m in measurements:
        start = f"{m.shape:>12} {m.rows:>4} {m.tokens:>7} {m.dtype:>8}  {m.what:14}"
        figures = m.problem if m.microseconds is None else f"{m.microseconds:10.1f} {m.tflop_per_s:9.3f}"
        lines.append(f"{start} {figures}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time the attention backends that run here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    if parser.parse_args().device == "cuda":
        print(table(gpu(math.inf)))
        return
    for dtype in (torch.float32, torch.bfloat16):
        made = measure("cpu", CPU_SHAPES, dtype)
        print(table([m for m in made if m.microseconds is not None]))


if __name__ == "__main__":
    main()
