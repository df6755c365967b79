"""What CUDA graphs are worth in a step of a denoiser at full size, by its number of tokens.

    python -m benchmarks.bench_graphs [--models FLUX.1-dev] [--seconds 200] [--results FOLDER]     on a GPU machine

Weights are random. A step is timed as a server takes it: launched, and waited for. "graph" is by the feature that
serves requests (--cuda-graph-tokens), with what it copies; "first" is the step that captures. Both give the same bits,
which is checked.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import timing
from benchmarks.bench_models import CASES, WAYS, Case, Step, Way, _built, options_of
from omni_grpc.features.cuda_graphs import CudaRecorder, Graphs
from omni_grpc.nn.stack import main_stack

ENOUGH = 1 << 20
STEPS = 7

SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "FLUX.1-dev": {f"{16 * side} x {16 * side}": {"side": side} for side in (16, 32, 48, 64)},
    "Qwen-Image": {f"{16 * side} x {16 * side}, guided": {"side": side} for side in (16, 32, 48, 64)},
    "Wan2.2-A14B": {
        "256 x 256, 1 frame": {"size": (1, 16, 16)},
        "256 x 256, 17 frames": {"size": (5, 16, 16)},
        "480 x 832, 17 frames": {"size": (5, 30, 52)},
    },
}
"""What a case's step is made with, by model and size."""
BY = ("ours bf16", "ours fp8", "ours fp8, attention fp8")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step, and MiB that its graph took; what the host needs to launch it without one."""

    model: str
    what: str
    size: str
    eager: float
    host: float
    graph: float
    first: float
    mib: float


def measure(names: Sequence[str], seconds: float) -> Iterator[Measurement]:
    deadline = time.monotonic() + seconds
    for case in CASES:
        for way in WAYS:
            if case.name in names and way.name in BY and time.monotonic() < deadline:
                yield from _by_size(case, way, deadline)


@torch.inference_mode()
def _by_size(case: Case, way: Way, deadline: float) -> Iterator[Measurement]:
    module, _ = _built(case, way)
    _, stack = main_stack(module)
    run = stack._run
    for size, keywords in SIZES[case.name].items():
        if time.monotonic() > deadline:
            return
        torch.manual_seed(2)
        step = case.ours(module, **keywords)
        expected = [step() for _ in range(3)][-1]
        eager = _times(step)
        stack.wrap(Graphs(stack, ENOUGH, CudaRecorder(torch.device("cuda", 0))).around)
        step(), step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        first, _ = _time(step)
        got, graph = step(), _times(step)
        mib = (torch.cuda.memory_reserved() - before) / 2**20
        if not torch.equal(got, expected):
            raise SystemExit(f"bench_graphs: {case.name}, {way.name}, {size}: a graph gives other bits")
        yield Measurement(case.name, way.name, size, eager[0], eager[1], graph[0], first, mib)
        stack._run = run
        del step, got, expected
        gc.collect()
        torch.cuda.empty_cache()


def _times(step: Step) -> tuple[float, float]:
    """Medians of the step, and of its launch."""
    taken = [_time(step) for _ in range(STEPS)]
    return statistics.median(total for total, _ in taken), statistics.median(host for _, host in taken)


def _time(step: Step) -> tuple[float, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3, host * 1e3


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        f"{'model':12} {'what':24} {'size':22} {'eager':>7} {'host':>7} {'graph':>7} {'ratio':>6} {'first':>7} "
        f"{'MiB':>6}"
    ]
    lines += [
        f"{m.model:12} {m.what:24} {m.size:22} {m.eager:7.1f} {m.host:7.1f} {m.graph:7.1f} {m.eager / m.graph:6.2f} "
        f"{m.first:7.1f} {m.mib:6.0f}"
        for m in measurements
    ]
    return "\n".join(lines)


def main() -> None:
    options = options_of("time steps with and without CUDA graphs")
    timing.require_gpu()
    made = measure(options.models, options.seconds)
    print(table(timing.recorded("benchmarks/bench_graphs.py", "graphs", made, options.results)))


if __name__ == "__main__":
    main()
