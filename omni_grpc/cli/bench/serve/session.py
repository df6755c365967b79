"""One load test: the connection, the warm-up, and a point for each rate that is measured."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import os
import platform
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from omni_grpc.cli.bench.serve.arrivals import Process
from omni_grpc.cli.bench.serve.measures import Objectives, kept_up, summary, why
from omni_grpc.cli.bench.serve.mix import MixClass, Requests, picks
from omni_grpc.cli.bench.serve.record import Record
from omni_grpc.cli.bench.serve.runner import How, LoadConnection, Runner
from omni_grpc.cli.bench.serve.samples import Sampled, as_dicts, sample
from omni_grpc.cli.bench.serve.search import search
from omni_grpc.cli.bench.serve.trace import Trace
from omni_grpc.cli.bench.serve.work import Work
from omni_grpc.cli.signals import ENDING
from omni_grpc.types.errors import ConfigError, FailedPrecondition, Violation
from omni_grpc.types.version import __version__
from omni_grpc.v1.admin_pb2 import GetServerInfoRequest, GetServerInfoResponse
from omni_grpc.v1.model_pb2 import Model

SCHEMA = "omni_grpc/bench-serve/1"
"""The format of the JSON that is written; the number grows where a field changes its meaning or goes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured. One of `trace`, `concurrency`, `rates` and `saturate` says how requests come; `saturate` is the
    first rate of a search. `seconds` and `most`: how long requests are sent, and how many at most. `target`: the share
    that is to keep its objectives. `warmup`: requests of each class before; `interval`: seconds between two samples of
    the server's load.
    """

    classes: Sequence[MixClass]
    process: Process
    trace: Trace | None = None
    concurrency: int | None = None
    rates: Sequence[float] = ()
    saturate: float | None = None
    precision: float = 0.1
    seconds: float | None = None
    most: int | None = None
    objectives: Objectives
    target: float
    warmup: int
    interval: float
    seed: int
    how: How


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One run at one rate (None: no rate was asked for)."""

    label: str
    rate: float | None
    records: Sequence[Record]
    sampled: Sampled
    summary: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "rate": self.rate,
            "summary": self.summary,
            "server": self.sampled.summary(),
            "samples": as_dicts(self.sampled.samples),
            "requests": [record.as_dict() for record in sorted(self.records, key=lambda record: record.number)],
        }


Told = Callable[[Point], None]


class Session:
    """A load test of one model of a server. What it has measured stays in `points` when it is interrupted."""

    def __init__(self, connection: LoadConnection, model: Model, plan: Plan, told: Told) -> None:
        self._connection, self._plan, self._told = connection, plan, told
        self._requests = Requests(model, plan.classes, plan.seed)
        self.stop = asyncio.Event()
        self.points: list[Point] = []
        self.saturation: dict[str, Any] | None = None

    async def run(self) -> None:
        """Raises FailedPrecondition where no request of the warm-up succeeded: nothing can be measured then."""
        plan = self._plan
        await self._warm_up()
        if plan.trace is not None:
            await self._point(Work(names=plan.trace.names, times=plan.trace.times), "trace")
        elif plan.concurrency is not None:
            await self._point(
                self._work(concurrency=plan.concurrency, seconds=plan.seconds), f"{plan.concurrency} at a time"
            )
        elif plan.saturate is not None:
            found = await search(self._enough, plan.saturate, plan.precision)
            self.saturation = {"target": plan.target, "rate": found.rate, "above": found.above}
        for rate in plan.rates:
            if not self.stop.is_set():
                await self._at(rate)

    async def _enough(self, rate: float) -> bool | None:
        if self.stop.is_set():
            return None
        point = await self._at(rate)
        share: float | None = point.summary["attainment"]
        if self.stop.is_set() or share is None:
            return None
        # where the client was late, what is found is too low and not too high: its delay is in the latencies
        return share >= self._plan.target and kept_up(point.records)

    async def _at(self, rate: float) -> Point:
        plan = self._plan
        times = plan.process.times(rate, plan.seconds, plan.most, plan.seed)
        if not times:
            rule = f"is {plan.seconds:g} s, in which no request comes at {rate:g} per second; give a longer one"
            raise ConfigError(f"--duration {rule}", violations=(Violation("duration", rule),))
        return await self._point(self._work(times=times, seconds=plan.seconds), f"{rate:g}/s", rate)

    def _work(self, **more: Any) -> Work:
        names: Any = picks(self._plan.classes, self._plan.seed)
        if (most := self._plan.most) is not None:
            names = [next(names) for _ in range(most)]
        return Work(names=names, **more)

    async def _warm_up(self) -> None:
        plan = self._plan
        names = [klass.name for klass in plan.classes for _ in range(plan.warmup)]
        if not names:
            return
        runner = self._runner()
        await runner.run(Work(names=names, concurrency=len(names)), self.stop)
        failed = [record for record in runner.records if not record.succeeded]
        if len(failed) == len(names) and not self.stop.is_set():
            said = f"all {len(names)} requests of the warm-up failed, the first with {why(failed[0])}"
            raise FailedPrecondition(f"{said}: nothing was measured")

    async def _point(self, work: Work, label: str, rate: float | None = None) -> Point:
        runner, sampled, used = self._runner(), Sampled(), time.process_time()
        clock = asyncio.get_running_loop().time
        began = clock()
        watching = asyncio.create_task(
            sample(self._connection, self._plan.interval, lambda: clock() - began, lambda: runner.rows, sampled)
        )
        try:
            await runner.run(work, self.stop)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        cpu = (time.process_time() - used) / max(1e-9, clock() - began)
        found = summary(runner.records, self._plan.objectives, offered=work.offered, client_cpu=cpu)
        point = Point(label=label, rate=rate, records=runner.records, sampled=sampled, summary=found)
        self.points.append(point)
        self._told(point)
        return point

    def _runner(self) -> Runner:
        return Runner(self._connection, self._requests, self._plan.how)


async def server_info(connection: LoadConnection) -> GetServerInfoResponse:
    info: GetServerInfoResponse = await connection.unary(connection.admin.GetServerInfo, GetServerInfoRequest())
    return info


def provenance(info: GetServerInfoResponse, model: Model, address: str) -> dict[str, Any]:
    """Where figures come from: the server, the model that it serves, and this client."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "server": {
            "address": address,
            "version": info.version,
            "git_sha": info.git_sha,
            "instance_id": info.instance_id,
            "device": ", ".join(gpu.name for gpu in info.gpus) or info.features.get("device", ""),
            "features": dict(sorted(info.features.items())),
            "max_queue": info.max_queue,
        },
        "model": {"name": model.name, "family": model.family},
        "client": {
            "version": __version__,
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
    }


@contextlib.asynccontextmanager
async def interruptible(stop: asyncio.Event) -> AsyncIterator[list[signal.Signals]]:
    """Within it the first Ctrl-C, SIGTERM or SIGHUP sets the event, and is in the list; a second one ends the process
    as ever. Only in the main thread, which alone gets signals.
    """
    loop, came = asyncio.get_running_loop(), list[signal.Signals]()
    numbers = [number for number in (signal.SIGINT, *ENDING) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}

    def ask(number: signal.Signals) -> None:
        came.append(number)
        stop.set()
        for restored in _removed(loop, numbers):
            signal.signal(restored, before[restored])

    added = []
    try:
        for number in numbers:
            loop.add_signal_handler(number, ask, number)
            added.append(number)
    except (RuntimeError, ValueError, NotImplementedError):  # another thread, or an event loop without signals
        numbers = added
    try:
        yield came
    finally:
        for restored in _removed(loop, numbers):
            signal.signal(restored, before[restored])


def _removed(loop: asyncio.AbstractEventLoop, numbers: Sequence[signal.Signals]) -> Iterator[signal.Signals]:
    """Those whose handlers were still there."""
    for number in numbers:
        if loop.remove_signal_handler(number):
            yield number
