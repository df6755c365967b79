"""Engines in this process whose replicas are worker processes, and clients that keep them busy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, JobState, ProcessExecutor, Submission
from omni_grpc.engine.executor import WORKER
from omni_grpc.engine.replica import ReplicaState
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.store.open import open_storage
from omni_grpc.types.errors import OmniError
from omni_grpc.types.request import Draft

from . import quick_worker

QUICK = "benchmarks.service.quick_worker:serve"
PATIENCE = 60.0
"""Seconds that a replica gets to come back, and a job to end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Whose workers: those without a model, whose steps last `step` seconds, or those of a checkpoint (a folder), with
    one torch thread each. Jobs are squares of `size` pixels with so many steps, at least and at most.
    """

    checkpoint: Path | None = None
    step: float = 0.02
    size: int = 64
    steps: tuple[int, int] = (4, 12)


@contextlib.asynccontextmanager
async def engine(kind: Kind, replicas: int, places: int, folder: str = "") -> AsyncIterator[Engine]:
    """One all of whose replicas are ready; each has `places` jobs at a time. `folder`: where SQLite keeps its jobs;
    empty: in memory.
    """
    settings = {
        "data_parallel_size": replicas,
        "device": "cpu",
        "max_num_seqs": places,
        "max_queue": 4096,
        "restart_backoff": 0.0,
        "cpu_threads": 1,
        "warm_up_seconds": 0.5,
        **({"state_dir": folder} if folder else {}),
    }
    if kind.checkpoint is None:
        config, worker = EngineConfig.from_settings(**settings), QUICK
        checkpoint = quick_worker.checkpoint()
    else:
        config, worker = EngineConfig.from_settings(**settings, model=str(kind.checkpoint)), WORKER
        checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    environment = {quick_worker.STEP: f"{kind.step:g}"}
    first, *more = [
        ProcessExecutor(config, checkpoint, worker=worker, environment=environment) for _ in range(replicas)
    ]
    found = Engine(config, checkpoint, first, open_storage(config), more=more)
    try:
        await found.start()
        if not await until(lambda: all(one.state is ReplicaState.READY for one in found._replicas)):
            raise RuntimeError(f"not every replica is ready after {PATIENCE:.0f} s")
        yield found
    finally:
        await found.close()
        await found.storage.close()


def submit(engine: Engine, kind: Kind, steps: int) -> Job:
    """Makes a job. Raises what refuses it."""
    draft = Draft(
        model=engine.checkpoint.name, prompt="a red circle", width=kind.size, height=kind.size, steps=steps, seeds=(1,)
    )
    job, _ = engine.submit(Submission(draft=draft, retention=10 * PATIENCE))
    return job


async def ended(job: Job, patience: float | None = None) -> bool:
    """Waits for a job's end; False where nothing happens to it for `patience` seconds."""
    while not job.state.terminal:
        if not await job.wait(job.last_seq, patience):
            return False
    return True


async def until(condition: Callable[[], bool]) -> bool:
    """Whether it has come true, for which it gets PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not (met := condition()) and time.monotonic() < end:  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.005)
    return met


class Crowd:
    """Clients each of which makes one job after the other: so many jobs wait or run at any time."""

    def __init__(self, engine: Engine, kind: Kind, clients: int, seed: int) -> None:
        self._engine = engine
        self._kind = kind
        self._chance = random.Random(seed)
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self.acknowledged: list[Job] = []
        """A job is, once it is committed."""
        self.finished: list[float] = []
        """When jobs succeeded, by time.monotonic."""
        self.refused: list[OmniError] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]

    async def stop(self) -> None:
        """Nobody makes any more jobs. Raises what a client has met that is no refusal."""
        for task in self._tasks:
            task.cancel()
        for met in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(met, Exception):
                raise met

    async def _client(self) -> None:
        while True:
            try:
                job = submit(self._engine, self._kind, self._chance.randint(*self._kind.steps))
            except OmniError as error:
                self.refused.append(error)
                await asyncio.sleep(0.05)
                continue
            await self._engine.storage.journal.settled(job.id)
            self.acknowledged.append(job)
            await ended(job)
            if job.state is JobState.SUCCEEDED:
                self.finished.append(time.monotonic())

    def within(self, began: float, over: float) -> int:
        """The number of jobs that succeeded between two times."""
        return sum(began <= at < over for at in self.finished)


async def unended(jobs: Sequence[Job]) -> list[str]:
    """What does not end, in words."""
    return [f"{job.id} is {job.state} and does not end" for job in jobs if not await ended(job, PATIENCE)]
