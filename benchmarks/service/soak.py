"""Many jobs, no two of one size: the memory of the worker and of the server, by the number of jobs.

What grows with the sizes that were seen is kept for the next job of the same size, and must have a bound. On a CPU, the
caches of oneDNN and of torch's layer above it took most; ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY in the
environment set other bounds than the worker's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import statistics
import time
from pathlib import Path

from omni_grpc.client import Client

from .report import Result
from .server import PATIENCE, Server, rss_bytes, served

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

MOST_GROWTH = 0.1
"""Share of its memory at half time that the worker may grow by in the second half."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    jobs: int = 400
    every: int = 50
    """Jobs between two looks at the memory."""
    smallest: int = 64
    largest: int = 512
    multiple: int = 16
    steps: int = 1
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Memory in MB after so many jobs, and the median seconds of the jobs since the look before."""

    jobs: int
    worker: float
    server: float
    seconds: float


def run(checkpoint: Path) -> Result:
    with served(checkpoint, "--retention", "0") as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    looks: list[Look] = []
    with Client(server.address) as client:
        sizes = _sizes(numbers)
        for done in range(0, numbers.jobs, numbers.every):
            seconds = []
            for _, (width, height) in zip(range(numbers.every), sizes, strict=False):
                began = time.monotonic()
                client.generate_image(
                    "a red circle", width=width, height=height, steps=numbers.steps, seed=7, timeout=PATIENCE
                )
                seconds.append(time.monotonic() - began)
            looks.append(_look(server, done + numbers.every, statistics.median(seconds)))
    return _result(numbers, looks)


def _sizes(numbers: Numbers) -> itertools.cycle[tuple[int, int]]:
    """Every size once, in a random order, before one comes again."""
    edges = range(numbers.smallest, numbers.largest + 1, numbers.multiple)
    sizes = list(itertools.product(edges, edges))
    random.Random(numbers.seed).shuffle(sizes)
    return itertools.cycle(sizes)


def _look(server: Server, jobs: int, seconds: float) -> Look:
    return Look(jobs=jobs, worker=rss_bytes(server.worker()) / 1e6, server=rss_bytes(server.pid) / 1e6, seconds=seconds)


def _result(numbers: Numbers, looks: list[Look]) -> Result:
    rows = [
        (str(look.jobs), f"{look.worker:.0f} MB", f"{look.server:.0f} MB", f"{1000 * look.seconds:.0f} ms")
        for look in looks
    ]
    half = looks[(len(looks) - 1) // 2]
    growth = looks[-1].worker / half.worker - 1
    problems = []
    if growth > MOST_GROWTH:
        problems.append(f"from job {half.jobs} to job {looks[-1].jobs} the worker grew by {100 * growth:.0f} %")
    figures = {
        "numbers": dataclasses.asdict(numbers),
        "capacities_of_the_environment": [os.environ.get(name) for name in CAPACITIES],
        "looks": [dataclasses.asdict(look) for look in looks],
    }
    return Result(columns=("jobs", "worker", "server", "a job"), rows=rows, figures=figures, problems=problems)
