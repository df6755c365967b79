"""What two replicas of a model are worth against one, and that jobs outlive either of them.

The engine, its executors and the worker processes are real. Jobs per second of one replica and of two are counted in
turns, with more jobs waiting than either has places for: with workers without a model, whose steps are sleep, which
shows what the scheduling leaves of twice as much; and with a real checkpoint and one torch thread for each worker,
which shows what this machine's cores do. Then one of two workers is killed again and again under load, with jobs kept
in SQLite: every acknowledged job must end, as succeeded or as a failure that may be retried, those of the other replica
must succeed, and the store must have them all. Last, one replica after the other is started anew under load, which no
job may notice.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.engine import Engine, Job, JobState
from omni_grpc.engine.replica import Replica, ReplicaState
from omni_grpc.store.open import open_storage
from omni_grpc.types import shared_memory as shared

from .replicated import PATIENCE, Crowd, Kind, ended, engine, unended, until
from .report import Result, spread

REPLICAS = 2
LEAST_GAIN = 1.9
"""Of the scheduling alone: two workers that sleep, over one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`places` of each replica; a round counts for `seconds`, after `lead` seconds in which places fill up."""

    rounds: int = 5
    seconds: float = 8.0
    lead: float = 1.0
    places: int = 4
    quick: Kind = dataclasses.field(default_factory=lambda: Kind(step=0.04))
    real: Kind = dataclasses.field(default_factory=lambda: Kind(size=128))
    kills: int = 30
    longest: float = 1.5
    """Most seconds between the return of a replica and the next kill."""
    renewals: int = 20
    """Of both replicas, one after the other."""
    seed: int = 0


def run(checkpoint: Path) -> Result:
    return measure(checkpoint, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    return asyncio.run(_measure(dataclasses.replace(numbers.real, checkpoint=checkpoint), numbers))


async def _measure(real: Kind, numbers: Numbers) -> Result:
    before = _blocks()
    speeds = {name: await _speeds(kind, numbers) for name, kind in (("quick", numbers.quick), ("real", real))}
    with tempfile.TemporaryDirectory(prefix="omni-replicas-") as folder:
        killed = await _killed(numbers, folder)
    renewed = await _renewed(numbers)
    problems = [*killed.problems, *renewed.problems]
    if left := _blocks() - before:
        problems.append(f"{len(left)} shared-memory blocks are left")
    return _result(numbers, speeds, killed, renewed, problems)


# --- jobs per second --------------------------------------------------------------------------------------------------


async def _speeds(kind: Kind, numbers: Numbers) -> Mapping[int, list[float]]:
    """Jobs per second in each round, by the number of replicas."""
    found: dict[int, list[float]] = {1: [], REPLICAS: []}
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            replicas: await stack.enter_async_context(engine(kind, replicas, numbers.places)) for replicas in found
        }
        # in turns, so that what else the machine does falls on both
        for number in range(numbers.rounds):
            for replicas, one in engines.items():
                found[replicas].append(await _speed(one, kind, numbers, replicas, number))
    return found


async def _speed(one: Engine, kind: Kind, numbers: Numbers, replicas: int, seed: int) -> float:
    # as many wait as run
    crowd = Crowd(one, kind, 2 * numbers.places * replicas, seed)
    crowd.start()
    await asyncio.sleep(numbers.lead)
    began = time.monotonic()
    await asyncio.sleep(numbers.seconds)
    over = time.monotonic()
    await crowd.stop()
    await asyncio.gather(*map(ended, crowd.acknowledged))
    return crowd.within(began, over) / (over - began)


# --- kills ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Killed:
    """What kills did. `held`: jobs of the killed replica, and `others`: of the other one, at the moment of a kill, by
    how they ended.
    """

    back: list[float] = dataclasses.field(default_factory=list)
    next_finished: list[float] = dataclasses.field(default_factory=list)
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    held: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    others: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lost: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


async def _killed(numbers: Numbers, folder: str) -> Killed:
    found, moments = Killed(), random.Random(numbers.seed)
    async with engine(numbers.quick, REPLICAS, numbers.places, folder) as one:
        crowd = Crowd(one, numbers.quick, 2 * numbers.places * REPLICAS, numbers.seed)
        crowd.start()
        for number in range(numbers.kills):
            await asyncio.sleep(moments.uniform(0, numbers.longest))
            if not await _kill(one, moments.choice(one._replicas), crowd, found):
                found.problems.append(f"the replica did not come back within {PATIENCE:.0f} s of kill {number + 1}")
                break
        await crowd.stop()
        found.problems += await unended(crowd.acknowledged)
        config = one.config
    found.problems += [f"a job was refused: {error}" for error in crowd.refused]
    found.ends.update(map(_end, crowd.acknowledged))
    lost = [job for job in crowd.acknowledged if not _kept_its_promise(job)]
    # what a server would find that is started now
    storage = open_storage(config)
    await storage.open()
    kept = await storage.store.jobs.read([job.id for job in crowd.acknowledged])
    stored = {each.record.id: each.record for each in kept}
    await storage.close()
    lost += [job for job in crowd.acknowledged if job.id not in stored or stored[job.id].state is not job.state]
    found.lost = len({job.id for job in lost})
    found.problems += [f"{job.id} is lost: {_end(job)}" for job in lost]
    return found


async def _kill(one: Engine, replica: Replica, crowd: Crowd, found: Killed) -> bool:
    """Kills a replica's worker and waits for the next one, and for the jobs that both had."""
    assert replica.ready is not None
    pid, (other,) = replica.ready.pid, [each for each in one._replicas if each is not replica]
    jobs = {job.id: job for job in crowd.acknowledged}
    held = [jobs[job_id] for job_id in replica.scheduler.held if job_id in jobs]
    others = [jobs[job_id] for job_id in other.scheduler.held if job_id in jobs]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        return replica.open and replica.ready is not None and replica.ready.pid != pid

    if not await until(is_back):
        return False
    found.back.append(time.monotonic() - began)
    if not await until(lambda: bool(crowd.finished) and crowd.finished[-1] > began):
        return False
    found.next_finished.append(next(at for at in crowd.finished if at > began) - began)
    # before the next kill, which may take them
    found.problems += await unended([*held, *others])
    found.held.update(map(_end, held))
    found.others.update(map(_end, others))
    found.problems += [
        f"{job.id} of the other replica ended {_end(job)}" for job in others if job.state is not JobState.SUCCEEDED
    ]
    return True


def _end(job: Job) -> str:
    return str(job.state) if job.failure is None else f"{job.state} {job.failure.reason}"


def _kept_its_promise(job: Job) -> bool:
    return job.state is JobState.SUCCEEDED or (job.failure is not None and job.failure.retryable)


# --- a rolling restart ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Renewed:
    """`took`: seconds from the call until the replica is ready again. `longest_gap`: seconds without a finished job."""

    took: list[float] = dataclasses.field(default_factory=list)
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: int = 0
    longest_gap: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


async def _renewed(numbers: Numbers) -> Renewed:
    found = Renewed()
    async with engine(numbers.quick, REPLICAS, numbers.places) as one:
        crowd = Crowd(one, numbers.quick, 2 * numbers.places * REPLICAS, numbers.seed)
        crowd.start()
        await asyncio.sleep(numbers.lead)
        for number in range(numbers.renewals * REPLICAS):
            if not await _renew(one, number % REPLICAS, found):
                found.problems.append(f"replica {number % REPLICAS} was not ready {PATIENCE:.0f} s after its renewal")
                break
        await crowd.stop()
        found.problems += await unended(crowd.acknowledged)
    found.ends.update(map(_end, crowd.acknowledged))
    found.refused = len(crowd.refused)
    found.longest_gap = max((b - a for a, b in zip(crowd.finished, crowd.finished[1:], strict=False)), default=0.0)
    found.problems += [f"a job was refused: {error}" for error in crowd.refused]
    found.problems += [
        f"{job.id} ended {_end(job)}" for job in crowd.acknowledged if job.state is not JobState.SUCCEEDED
    ]
    return found


async def _renew(one: Engine, number: int, found: Renewed) -> bool:
    replica = one._replicas[number]
    assert replica.ready is not None
    pid, began = replica.ready.pid, time.monotonic()
    one.renew(number, PATIENCE)

    def is_new() -> bool:
        return replica.state is ReplicaState.READY and replica.ready is not None and replica.ready.pid != pid

    if not await until(is_new):
        return False
    found.took.append(time.monotonic() - began)
    return True


# --- the report -------------------------------------------------------------------------------------------------------


def _blocks() -> set[str]:
    return {path.name for path in shared.BLOCKS.glob(f"omni-{os.getpid()}-*")}


def _gains(speeds: Mapping[int, Sequence[float]]) -> list[float]:
    """Two replicas over one, of each round."""
    return [two / one for one, two in zip(speeds[1], speeds[REPLICAS], strict=True)]


def _result(
    numbers: Numbers,
    speeds: Mapping[str, Mapping[int, list[float]]],
    killed: Killed,
    renewed: Renewed,
    problems: list[str],
) -> Result:
    gains = {name: statistics.median(_gains(found)) for name, found in speeds.items()}
    if numbers.rounds > 1 and gains["quick"] < LEAST_GAIN:
        problems.append(f"two replicas do {gains['quick']:.2f} times the jobs of one, by the scheduling alone")
    rows = []
    for name, who in (("quick", "workers that sleep"), ("real", "real workers, one thread each")):
        rows += [
            (f"{who}: one replica", spread(speeds[name][1], "jobs/s")),
            ("... two", spread(speeds[name][REPLICAS], "jobs/s")),
            ("... two over one", spread(_gains(speeds[name]), digits=2)),
        ]
    rows += [
        ("kills of one of two: the replica came back", f"{len(killed.back)} of {numbers.kills}"),
        ("... kill to its next Ready", spread(killed.back, "s", 2)),
        ("... kill to the next finished job", spread(killed.next_finished, "s", 3)),
        ("... jobs acknowledged", str(sum(killed.ends.values()))),
        *((f"... that ended {end}", str(count)) for end, count in sorted(killed.ends.items())),
        ("... lost", str(killed.lost)),
        *((f"... jobs of the killed replica that ended {end}", str(n)) for end, n in sorted(killed.held.items())),
        *((f"... jobs of the other one that ended {end}", str(n)) for end, n in sorted(killed.others.items())),
        ("rolling restarts of both", str(len(renewed.took) // REPLICAS)),
        ("... renewal of one, until it is ready", spread(renewed.took, "s", 2)),
        *((f"... jobs that ended {end}", str(count)) for end, count in sorted(renewed.ends.items())),
        ("... jobs refused", str(renewed.refused)),
        ("... longest time without a finished job", f"{renewed.longest_gap:.2f} s"),
    ]
    figures: dict[str, Any] = {
        "numbers": {**dataclasses.asdict(numbers), "real": {**dataclasses.asdict(numbers.real), "checkpoint": True}},
        "jobs_per_second": {name: {str(n): values for n, values in found.items()} for name, found in speeds.items()},
        "two_over_one": gains,
        "kills": {
            "back_seconds": killed.back,
            "next_finished_seconds": killed.next_finished,
            "ends": dict(killed.ends),
            "held_by_the_killed": dict(killed.held),
            "held_by_the_other": dict(killed.others),
            "lost": killed.lost,
        },
        "renewals": {
            "seconds": renewed.took,
            "ends": dict(renewed.ends),
            "refused": renewed.refused,
            "longest_gap": renewed.longest_gap,
        },
    }
    return Result(
        columns=("what", "found"),
        rows=rows,
        figures=figures,
        problems=problems,
        arguments=f"--kills {numbers.kills}",
    )
