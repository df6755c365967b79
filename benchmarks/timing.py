"""How the benchmarks of ops take time.

On a GPU a measurement is a CUDA graph of CALLS calls, timed with events: the device's time alone, without the host's.
Inputs rotate through more memory than the L2 cache holds, and every call has an output of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[..., Any]

CALLS = 20
REPEATS = 15
BEYOND_L2 = 256 * 2**20


def attempt(timer: Callable[[Call, Any], float], call: Call, sets: Any) -> tuple[float | None, str]:
    try:
        return timer(call, sets), ""
    except Exception as error:  # noqa: BLE001 - torch.compile fails in many ways, and the other rows still count
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def time_on_gpu(call: Call, sets: Sequence[tuple[Any, ...]], *, calls: int = CALLS, repeats: int = REPEATS) -> float:
    """Seconds of one call, the median of so many replays of a graph of so many calls."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for inputs in sets[:2]:
            call(*inputs)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(*sets[i % len(sets)]) for i in range(calls)]
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    del outputs, graph
    return statistics.median(times[3:])


def time_on_cpu(call: Call, sets: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of one call, the median of enough of them for 50 ms or REPEATS."""
    times: list[float] = []
    while len(times) < REPEATS + 3 or sum(times) < 0.05:
        start = time.perf_counter()
        call(*sets[0])
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])
