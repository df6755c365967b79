"""Two replicas in actors of a real Ray, one of which is killed again and again while jobs run.

The engine, its drivers, Ray and the actors are real; the worker has no model (`ray_worker`), so that a life of it is
short. What must hold each time: every acknowledged job ends, as succeeded or as a failure that may be retried, the
other replica goes on, and the killed one comes back.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, JobState, Submission
from omni_grpc.engine.ray_executor import ray_executors
from omni_grpc.engine.replica import Replica
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.store.open import open_storage
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.request import Draft

from .ray_worker import DRIVER
from .report import Result, spread

REPLICAS = 2
PATIENCE = 60.0
"""Seconds that a replica gets to come back, and a job to end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    kills: int = 20
    jobs: int = 6
    """Jobs that are kept going; each is replaced when it ends."""
    steps: int = 10
    """Of 20 ms."""
    longest: float = 2.0
    """Most seconds between the return of a replica and the next kill."""
    seed: int = 0


@dataclasses.dataclass
class Ends:
    """How the acknowledged jobs ended, and when the last one succeeded."""

    acknowledged: list[Job] = dataclasses.field(default_factory=list)
    finished: list[float] = dataclasses.field(default_factory=list)


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(numbers, folder))


async def _measure(numbers: Numbers, folder: str) -> Result:
    config = EngineConfig.from_settings(
        distributed_executor_backend="ray",
        data_parallel_size=REPLICAS,
        device="cpu",
        max_num_seqs=1,
        restart_backoff=0,
        state_dir=folder,
    )
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    first, *more = ray_executors(config, checkpoint, driver=DRIVER)
    engine = Engine(config, checkpoint, first, open_storage(config), more=more)
    before = _blocks()
    await engine.start()
    ends, problems = Ends(), []
    clients = [asyncio.create_task(_client(engine, numbers, ends)) for _ in range(numbers.jobs)]
    moments = random.Random(numbers.seed)
    back, next_ones = [], []
    for kill in range(numbers.kills):
        await _until(lambda: all(one.open for one in engine._replicas))
        await asyncio.sleep(moments.uniform(0, numbers.longest))
        killed = await _kill(moments.choice(engine._replicas), ends)
        if killed is None:
            problems.append(f"the replica did not come back within {PATIENCE:.0f} s of kill {kill + 1}")
            break
        back.append(killed[0])
        next_ones.append(killed[1])
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    problems += [f"{job.id} is {job.state} and does not end" for job in ends.acknowledged if not await _ends(job)]
    how = collections.Counter(
        str(job.state) if job.failure is None else f"{job.state} {job.failure.reason}" for job in ends.acknowledged
    )
    lost = [job for job in ends.acknowledged if job.state is not JobState.SUCCEEDED and not _may_retry(job)]
    problems += [f"{job.id} is lost: {job.state} {job.failure}" for job in lost]
    await engine.close()
    await engine.storage.close()
    if left := _blocks() - before:
        problems.append(f"{len(left)} shared-memory blocks are left")
    return _result(numbers, back, next_ones, how, len(lost), problems)


async def _client(engine: Engine, numbers: Numbers, ends: Ends) -> None:
    """Makes one job after the other. A job is acknowledged once it is committed."""
    while True:
        draft = Draft(
            model=engine.checkpoint.name, prompt="a red circle", width=64, height=64, steps=numbers.steps, seeds=(1,)
        )
        job, _ = engine.submit(Submission(draft=draft, retention=10 * PATIENCE))
        await engine.storage.journal.settled(job.id)
        ends.acknowledged.append(job)
        while not job.state.terminal:
            await job.wait(job.last_seq)
        if job.state is JobState.SUCCEEDED:
            ends.finished.append(time.monotonic())


async def _kill(replica: Replica, ends: Ends) -> tuple[float, float] | None:
    """Kills the actor's process and waits for the next one. Returns the seconds to that, and to the next job that any
    replica finished; None: it did not come.
    """
    assert replica.ready is not None
    pid, began = replica.ready.pid, time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if not await _until(lambda: replica.ready is not None and replica.ready.pid != pid and bool(ends.finished)):
        return None
    back = time.monotonic() - began
    if not await _until(lambda: ends.finished[-1] > began):
        return None
    return back, next(at for at in ends.finished if at > began) - began


def _may_retry(job: Job) -> bool:
    return job.failure is not None and job.failure.retryable


async def _until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE
    while not (met := condition()) and time.monotonic() < until:  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.005)
    return met


async def _ends(job: Job) -> bool:
    while not job.state.terminal:
        if not await job.wait(job.last_seq, PATIENCE):
            return False
    return True


def _blocks() -> set[str]:
    return {path.name for path in shared.BLOCKS.glob(f"omni-{os.getpid()}-*")}


def _result(
    numbers: Numbers,
    back: list[float],
    next_ones: list[float],
    how: collections.Counter[str],
    lost: int,
    problems: list[str],
) -> Result:
    rows = [
        ("the killed replica came back", f"{len(back)} of {numbers.kills} times"),
        ("kill to its next Ready", spread(back, "s", 2)),
        ("kill to the next finished job", spread(next_ones, "s", 2)),
        ("jobs acknowledged", str(sum(how.values()))),
        *((f"jobs that ended {end}", str(count)) for end, count in sorted(how.items())),
        ("jobs lost: neither succeeded nor failed as retryable", str(lost)),
        ("jobs that did not end, or blocks left", str(len(problems) - lost)),
    ]
    figures = {
        "numbers": dataclasses.asdict(numbers),
        "back_seconds": spread(back, "s", 3),
        "next_finished_seconds": spread(next_ones, "s", 3),
        "acknowledged": sum(how.values()),
        "ends": dict(how),
        "lost": lost,
    }
    return Result(
        columns=("what", f"of {numbers.kills} kills"),
        rows=rows,
        figures=figures,
        problems=problems,
        arguments=f"--kills {numbers.kills}",
    )
