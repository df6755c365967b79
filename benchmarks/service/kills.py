"""The worker is killed again and again, at random moments under load, mostly in the middle of a large report.

The engine, its executor and the process are real, the worker has no model (`big_reports`), so a life of it is short.
What must hold each time: every job ends, the worker comes back, no shared-memory block is left.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import random
import signal
import time
from pathlib import Path

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, ProcessExecutor, Submission
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.request import Draft

from .report import Result, spread

WORKER = "benchmarks.service.big_reports:serve"
PATIENCE = 60.0
"""Seconds that the worker gets to come back, and a job to end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    kills: int = 300
    jobs: int = 4
    """Jobs that are kept going; each is replaced when it ends."""
    steps: int = 3
    longest: float = 0.4
    """Most seconds that a worker lives once it is ready."""
    seed: int = 0


def run(checkpoint: Path) -> Result:
    return measure(checkpoint, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    return asyncio.run(_measure(checkpoint, numbers))


async def _measure(folder: Path, numbers: Numbers) -> Result:
    config = EngineConfig.from_settings(model=str(folder), max_num_seqs=numbers.jobs, restart_backoff=0)
    checkpoint = open_checkpoint(folder)
    engine = Engine(config, checkpoint, ProcessExecutor(config, checkpoint, worker=WORKER))
    before = _blocks()
    await engine.start()
    ends: collections.Counter[str] = collections.Counter()
    clients = [asyncio.create_task(_client(engine, checkpoint.name, numbers, ends)) for _ in range(numbers.jobs)]
    problems: list[str] = []
    back = []
    moments = random.Random(numbers.seed)
    for kill in range(numbers.kills):
        await asyncio.sleep(moments.uniform(0, numbers.longest))
        seconds = await _kill(engine)
        if seconds is None:
            problems.append(f"the worker did not come back within {PATIENCE:.0f} s of kill {kill + 1}")
            break
        back.append(seconds)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    stuck = [job for job in engine.jobs.newest() if not await _ends(job)]
    problems += [f"{job.id} is {job.state} and does not end" for job in stuck]
    await engine.close()
    if left := _blocks() - before:
        problems.append(f"{len(left)} shared-memory blocks are left")
    return _result(numbers, back, ends, problems)


async def _client(engine: Engine, model: str, numbers: Numbers, ends: collections.Counter[str]) -> None:
    """Makes one job after the other."""
    while True:
        draft = Draft(model=model, prompt="a red circle", width=64, height=64, steps=numbers.steps, num_outputs=2)
        job, _ = engine.submit(Submission(draft=draft, retention=2 * PATIENCE))
        while not job.state.terminal:
            await job.wait(job.last_seq)
        ends[job.state if job.failure is None else f"{job.state} {job.failure.reason}"] += 1


async def _kill(engine: Engine) -> float | None:
    """Kills the worker and waits for the next one. Returns the seconds that took; None: it did not come."""
    assert engine.ready is not None
    worker, began = engine.ready.pid, time.monotonic()
    os.kill(worker, signal.SIGKILL)
    while engine.ready.pid == worker:
        await asyncio.sleep(0.002)
        if time.monotonic() - began > PATIENCE:
            return None
    return time.monotonic() - began


async def _ends(job: Job) -> bool:
    while not job.state.terminal:
        if not await job.wait(job.last_seq, PATIENCE):
            return False
    return True


def _blocks() -> set[str]:
    return {path.name for path in shared.BLOCKS.glob(f"omni-{os.getpid()}-*")}


def _result(numbers: Numbers, back: list[float], ends: collections.Counter[str], problems: list[str]) -> Result:
    rows = [
        ("the worker came back", f"{len(back)} of {numbers.kills} times"),
        ("kill to the next worker's Ready", spread(back, "s", 2)),
        *((f"jobs that ended {end}", str(count)) for end, count in sorted(ends.items())),
        ("jobs that did not end, or blocks left", str(len(problems))),
    ]
    figures = {"numbers": dataclasses.asdict(numbers), "back_seconds": spread(back, "s", 3), "ends": dict(ends)}
    return Result(columns=("what", f"of {numbers.kills} kills"), rows=rows, figures=figures, problems=problems)
