"""Many watchers of a few jobs: is anything lost, how late are step events, and what does one cost the server.

All watchers are in one process with one connection, so an event waits there too: every step of all jobs makes one event
for each watcher, and the last of them is read after all the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.client import AsyncClient, Client

from .arrivals import STEP, Arrival, arrival, in_order, log, states
from .report import Result
from .server import PATIENCE, Server, served


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`loads` maps a label to the size and the steps of the jobs: the smaller, the more events there are."""

    jobs: int = 10
    watchers: int = 100
    loads: Mapping[str, tuple[int, int]] = dataclasses.field(
        default_factory=lambda: {"paced": (256, 100), "flat out": (64, 200)}
    )


def run(checkpoint: Path) -> Result:
    numbers = Numbers()
    with served(checkpoint, "--max-num-seqs", str(numbers.jobs)) as server:
        return measure(server, numbers)


def measure(server: Server, numbers: Numbers) -> Result:
    figures: dict[str, Any] = {}
    for label, (size, steps) in numbers.loads.items():
        figures[f"{label}, {size} x {size}"], replayed = asyncio.run(_measure(server, numbers, size, steps))
    figures["replay"] = replayed
    return Result(
        columns=(
            *("load", "events/s", "state events", "step events left out", "lag p50", "lag p99"),
            *("server CPU per event", "client CPU per event"),
        ),
        rows=[(label, *_cells(found)) for label, found in figures.items()],
        figures={"jobs": numbers.jobs, "watchers": numbers.watchers, "loads": figures},
        problems=[f"{label}: {problem}" for label, found in figures.items() for problem in _problems(found)],
    )


async def _measure(server: Server, numbers: Numbers, size: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the watchers of new jobs saw, and what they saw when the jobs had ended and they asked for all of it."""
    async with AsyncClient(server.address) as client, asyncio.timeout(PATIENCE):
        jobs = [
            await client.create_job("a red circle", width=size, height=size, steps=steps, seed=seed)
            for seed in range(numbers.jobs)
        ]
        job_ids = [jobs[place % len(jobs)].job_id for place in range(numbers.watchers)]
        live, replayed = [await _watch_all(server, client, job_ids) for _ in range(2)]
    with Client(server.address) as reader:
        logs = {job.job_id: states(log(reader, job.job_id)) for job in jobs}
    expected = [logs[job_id] for job_id in job_ids]
    return {**live.figures(expected), **live.lags()}, replayed.figures(expected)


async def _watch_all(server: Server, client: AsyncClient, job_ids: Sequence[str]) -> Watched:
    cpu, own = server.cpu_seconds(), time.process_time()
    arrivals = await asyncio.gather(*(_watch(client, job_id) for job_id in job_ids))
    return Watched(arrivals, server_cpu=server.cpu_seconds() - cpu, client_cpu=time.process_time() - own)


async def _watch(client: AsyncClient, job_id: str) -> list[Arrival]:
    return [arrival(event) async for event in client.watch_job(job_id)]


@dataclasses.dataclass(frozen=True)
class Watched:
    """What each watcher got, and the CPU seconds that it took on both sides."""

    arrivals: list[list[Arrival]]
    server_cpu: float
    client_cpu: float

    def figures(self, expected: Sequence[Sequence[int]]) -> dict[str, Any]:
        """`expected` has, for each watcher, the seq of every state event of its job."""
        received = [{one.seq for one in its if one.kind != STEP} for its in self.arrivals]
        events = sum(map(len, self.arrivals))
        seconds = max(its[-1].arrived for its in self.arrivals) - min(its[0].arrived for its in self.arrivals)
        return {
            "events": events,
            "seconds": seconds,
            "events_per_second": events / seconds,
            "state_events_expected": sum(map(len, expected)),
            "state_events_received": sum(map(len, received)),
            "state_events_lost": sum(len(set(all_) - got) for all_, got in zip(expected, received, strict=True)),
            "watchers_out_of_order": sum(not in_order(its) for its in self.arrivals),
            "step_events": sum(one.kind == STEP for its in self.arrivals for one in its),
            "step_events_left_out": sum(one.coalesced for its in self.arrivals for one in its),
            "server_cpu_us_per_event": 1e6 * self.server_cpu / events,
            "server_cpu_cores": self.server_cpu / seconds,
            "client_cpu_us_per_event": 1e6 * self.client_cpu / events,
        }

    def lags(self) -> dict[str, Any]:
        """Of step events, in milliseconds, from when every watcher was there: before, some were still being sent what
        had happened already.
        """
        everybody = max(its[0].arrived for its in self.arrivals)
        lags = [1000 * one.lag for its in self.arrivals for one in its if one.kind == STEP and one.sent > everybody]
        if not lags:
            raise RuntimeError("the jobs had ended before every watcher was there; take more steps")
        return {
            "lag_samples": len(lags),
            "lag_p50_ms": quantile(lags, 0.5),
            "lag_p99_ms": quantile(lags, 0.99),
            "lag_most_ms": max(lags),
        }


def _cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{found['events_per_second']:.0f}",
        f"{found['state_events_received']} of {found['state_events_expected']}",
        f"{found['step_events_left_out']} of {found['step_events'] + found['step_events_left_out']}",
        *(f"{found[lag]:.1f} ms" if lag in found else "-" for lag in ("lag_p50_ms", "lag_p99_ms")),
        f"{found['server_cpu_us_per_event']:.0f} us",
        f"{found['client_cpu_us_per_event']:.0f} us",
    )


def _problems(found: Mapping[str, Any]) -> list[str]:
    problems = []
    if found["state_events_lost"] or found["state_events_received"] != found["state_events_expected"]:
        problems.append(f"{found['state_events_lost']} state events were lost")
    if found["watchers_out_of_order"]:
        problems.append(f"{found['watchers_out_of_order']} watchers got events out of order")
    return problems
