"""How the benchmarks of ops take time.

On a GPU a measurement is a CUDA graph of CALLS calls, timed with events: the device's time alone, without the host's.
Inputs rotate through more memory than the L2 cache holds, and every call has an output of its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import provenance
from omni_grpc.types.output_files import write_file

Call = Callable[..., Any]
T = TypeVar("T")

CALLS = 20
REPEATS = 15
BEYOND_L2 = 256 * 2**20
SKIPPED = 77
"""The exit code of what a machine cannot run, as automake has it: `make bench` goes on."""
RESULTS = Path(__file__).resolve().parent / "results"


def attempt(timer: Callable[[Call, Any], float], call: Call, sets: Any) -> tuple[float | None, str]:
    try:
        return timer(call, sets), ""
    except Exception as error:  # noqa: BLE001 - torch.compile fails in many ways, and the other rows still count
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def time_on_gpu(call: Call, sets: Sequence[tuple[Any, ...]], calls: int = CALLS, repeats: int | None = None) -> float:
    """Seconds of one call, the median of REPEATS (or `repeats`) replays of a graph of `calls`."""
    repeats = REPEATS if repeats is None else repeats
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


def time_with_host(call: Call, sets: Sequence[tuple[Any, ...]], *, calls: int = CALLS, repeats: int = 5) -> float:
    """Seconds of one call as a model makes it, without a graph: of the host's and the device's time the longer one."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(*sets[i % len(sets)])
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def time_on_cpu(call: Call, sets: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of one call, the median of enough of them for 50 ms or REPEATS."""
    times: list[float] = []
    while len(times) < REPEATS + 3 or sum(times) < 0.05:
        start = time.perf_counter()
        call(*sets[0])
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def require_gpu() -> None:
    """Ends a script that measures nothing else with SKIPPED where there is none."""
    if not torch.cuda.is_available():
        print("needs a GPU, and torch finds none", file=sys.stderr)
        raise SystemExit(SKIPPED)


def recorded(script: str, name: str, made: Iterable[T], folder: Path, **more: Any) -> list[T]:
    """All that is measured, written anew with each measurement: what a script had when it was stopped is there."""
    measurements: list[T] = []
    for measurement in made:
        measurements.append(measurement)
        record(script, name, measurements, folder, **more)
    return measurements


def record(script: str, name: str, measurements: Sequence[Any], folder: Path, **more: Any) -> Path:
    """Writes what was measured on this GPU, dataclasses, to a file whose name begins with the card's."""
    card = torch.cuda.get_device_name()
    measured = {"measurements": [dataclasses.asdict(measurement) for measurement in measurements]}
    made = provenance.about(script) | more | measured
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', card.lower())}-{name}.json"
    write_file(file, (json.dumps(made, indent=1) + "\n").encode())
    return file
