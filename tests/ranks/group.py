"""A real engine whose worker is a group of ranks on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import PIL.Image
import psutil

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, Submission
from omni_grpc.engine.executor import Executor, ProcessExecutor
from omni_grpc.engine.rank_executor import RankExecutor
from omni_grpc.engine.status import EngineState
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.events import Event
from omni_grpc.types.request import Draft
from omni_grpc.types.spec import Checkpoint

Make = Callable[[EngineConfig, Checkpoint], Executor]
SOON = 240
"""Seconds in which a job, or a new group, has to be there, on a busy machine too."""


@dataclasses.dataclass
class Served:
    """An engine that is ready, and its executor."""

    engine: Engine
    executor: Executor
    name: str

    def submit(self, prompt: str = "a red circle", **options: object) -> Job:
        draft = {"width": 64, "height": 64, "steps": 4, "seeds": (7,), "num_outputs": 1} | options
        return self.engine.submit(Submission(draft=Draft(model=self.name, prompt=prompt, **draft)))[0]

    async def ended(self, job: Job) -> Job:
        await until(lambda: job.state.terminal)
        return job

    async def pixels(self, job: Job) -> list[np.ndarray]:
        """Those of a job that has to succeed."""
        await self.ended(job)
        assert job.failure is None, job.failure
        files = [await self.engine.artifacts.data(artifact.artifact_id) for artifact in _artifacts(job)]
        return [np.asarray(PIL.Image.open(io.BytesIO(file)).convert("RGB"), dtype=int) for file in files]

    @property
    def pids(self) -> list[int]:
        life = self.executor._process
        return life.pids if isinstance(self.executor, RankExecutor) else [life.pid]

    async def ready(self) -> None:
        await until(lambda: self.engine.state is EngineState.READY)


def events(job: Job) -> list[str]:
    return [type(entry.event).__name__ for entry in job.entries]


def _artifacts(job: Job) -> list[Event]:
    return [entry.event.artifact for entry in job.entries if type(entry.event).__name__ == "ArtifactReady"]


async def until(condition) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    model: Path, *, worker: str | None = None, make: Make | None = None, **settings: object
) -> AsyncIterator[Served]:
    """At its end no process of it is left. `make`: an executor that is none of this machine's processes."""
    usual = {"device": "cpu", "warm_up_seconds": 0.0, "restart_backoff": 0.0, "cpu_threads": 1}
    config = EngineConfig.from_settings(model=str(model), **usual | settings)
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    more = {} if worker is None else {"worker": worker}
    world = config.parallel.sizes.world
    if make is not None:
        executor = make(config, checkpoint)
    elif world == 1:
        executor = ProcessExecutor(config, checkpoint, **more)
    else:
        executor = RankExecutor(config, checkpoint, [{}] * world, **more)
    engine = Engine(config, checkpoint, executor)
    await engine.start()
    served = Served(engine, executor, checkpoint.name)
    try:
        yield served
    finally:
        pids = served.pids if make is None else []
        await engine.close()
    assert not any(map(psutil.pid_exists, pids))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"omni-{os.getpid()}-")]
