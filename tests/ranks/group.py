"""A real engine whose workers are groups of ranks on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import av
import numpy as np
import PIL.Image
import psutil

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, Submission
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.rank_executor import RankExecutor
from omni_grpc.engine.status import EngineState
from omni_grpc.engine.workers import executors
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
    more: Sequence[Executor] = ()
    """Those of other replicas."""

    def submit(self, prompt: str = "a red circle", *, priority: int = 0, **options: object) -> Job:
        draft = {"width": 64, "height": 64, "steps": 4, "seeds": (7,), "num_outputs": 1} | options
        asked = Submission(draft=Draft(model=self.name, prompt=prompt, **draft), priority=priority)
        return self.engine.submit(asked)[0]

    async def ended(self, job: Job) -> Job:
        await until(lambda: job.state.terminal)
        return job

    async def pixels(self, job: Job) -> list[np.ndarray]:
        """Those of a job that has to succeed, of each picture or frame."""
        await self.ended(job)
        assert job.failure is None, job.failure
        found = []
        for artifact in _artifacts(job):
            file = io.BytesIO(await self.engine.artifacts.data(artifact.artifact_id))
            if artifact.mime_type.startswith("video/"):
                with av.open(file) as video:
                    found += [frame.to_ndarray(format="rgb24").astype(int) for frame in video.decode(video=0)]
            else:
                found.append(np.asarray(PIL.Image.open(file).convert("RGB"), dtype=int))
        return found

    @property
    def pids(self) -> list[int]:
        """Of all replicas, one after the other."""
        return [pid for executor in (self.executor, *self.more) for pid in pids_of(executor)]

    async def ready(self) -> None:
        await until(lambda: self.engine.state is EngineState.READY)


def pids_of(executor: Executor) -> list[int]:
    life = executor._process
    return [] if life is None else life.pids if isinstance(executor, RankExecutor) else [life.pid]


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
    world = config.parallel.sizes.world
    others: Sequence[Executor] = ()
    if make is not None:
        first = make(config, checkpoint)
    elif worker is not None:
        assert config.processes == world > 1
        first = RankExecutor(config, checkpoint, [{}] * world, worker=worker)
    else:
        first, *others = executors(config, checkpoint)
    engine = Engine(config, checkpoint, first, more=others)
    served = Served(engine, first, checkpoint.name, others)
    try:
        await engine.start()
        yield served
    finally:
        pids = served.pids if make is None else []
        await engine.close()
    assert not any(map(psutil.pid_exists, pids))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"omni-{os.getpid()}-")]
