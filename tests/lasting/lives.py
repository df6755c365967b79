"""Real servers, one after the other or side by side, on a store that outlives them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.store.open import open_storage
from omni_grpc.store.storage import Storage
from omni_grpc.types.spec import Checkpoint
from omni_grpc.v1 import artifact_pb2, event_pb2, generation_pb2, job_pb2
from tests.server.fake_executor import FakeExecutor
from tests.server.service import CHECKPOINT, Service, kinds, unpack, until
from tests.store.failing import Trouble, Troubled

LEASE = 1.0
"""Seconds: the least that may be set."""


class Life(Service):
    """One life of a server. `trouble` stands before its store, and `blob_trouble` before its bytes."""

    def __init__(
        self, engine: Engine, gate: Gate, server: Server, executor: FakeExecutor, troubles: tuple[Trouble, Trouble]
    ) -> None:
        super().__init__(engine, server, executor)
        self.gate = gate
        self.trouble, self.blob_trouble = troubles
        self.over = False

    async def stop(self, drain: float = 0.0) -> None:
        """As SIGTERM does. Streams of its clients get their ends."""
        if not self.over:
            self.over = True
            await self.server.stop(drain)
            # whoever watched may not have read yet what the server has sent: closing without grace takes it away
            await self.channel.close(grace=5)

    async def abandon(self) -> None:
        """As kill -9 does: nothing more reaches the store, and what waited for it is lost. Its lock is free then."""
        self.over = True
        self.trouble.sever()
        self.blob_trouble.sever()
        self.pause()
        engine, storage = self.engine, self.engine.storage
        engine._timers.stop()
        await self.executor.close()
        await self.channel.close()
        for endpoint in self.server._endpoints:
            await endpoint._grpc.stop(None)
        await self.server._health.stop()
        tasks = [*storage._tasks, storage.journal._task, self.gate._recovery._task, *engine._outputs._tasks.values()]
        for task in [task for task in tasks if task is not None]:
            task.cancel()
        self.trouble.end()
        self.blob_trouble.end()
        engine._timers.stop()
        self.gate._media.close()
        await asyncio.to_thread(engine.inputs.close)
        await storage.blobs.close()
        await storage.store.close()

    def pause(self) -> None:
        """Gives no sign of life any more, and hears nothing: as a process that was stopped (SIGSTOP)."""
        for task in self.gate._sharing._tasks:
            task.cancel()


class Place:
    """Where servers keep what they have, and those that were started on it. `settings` are those of all."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.lives: list[Life] = []

    async def start(
        self,
        checkpoint: Checkpoint = CHECKPOINT,
        executor: FakeExecutor | None = None,
        before: Callable[[Life], None] = lambda life: None,
        **settings: Any,
    ) -> Life:
        """A server that takes jobs. `before` is called with it before it is started."""
        defaults = {"model": "toy", "port": 0, "restart_backoff": 0, "lease_seconds": LEASE}
        config = EngineConfig.from_settings(**(defaults | self.settings | settings))
        kept = open_storage(config)
        troubles = Trouble(), Trouble()
        store: Any = Troubled(kept.store, troubles[0])
        blobs: Any = Troubled(kept.blobs, troubles[1])
        executor = executor or FakeExecutor()
        engine = Engine(config, checkpoint, executor, Storage(config, store, blobs))
        gate = Gate(Fleet.of(engine))
        server = Server(gate, config)
        life = Life(engine, gate, server, executor, troubles)
        self.lives.append(life)
        before(life)
        try:
            await server.start()
        except BaseException:
            life.over = True
            raise
        # its port is known now
        await life.channel.close()
        life.connect()
        return life

    async def close(self) -> None:
        for life in self.lives:
            for trouble in (life.trouble, life.blob_trouble):
                trouble.mend()
            await life.stop()


@contextlib.asynccontextmanager
async def place(kind: str, folder: Path, url: str = "", **settings: Any) -> AsyncIterator[Place]:
    """A place of a kind: `sqlite`, a folder, or `postgresql`, the database at `url` and a folder."""
    where = {"state_dir": str(folder / "state")} if kind == "sqlite" else {"state_url": url}
    if kind != "sqlite":
        where["artifact_url"] = str(folder / "files")
    found = Place(**where, **settings)
    try:
        yield found
    finally:
        await found.close()


# --- what tests ask of them -------------------------------------------------------------------------------------------

FIRST = ["queued", "started", "encode_done"]


def kept(events: list[event_pb2.JobEvent]) -> list[str | None]:
    """Kinds without those that no store keeps."""
    return [kind for kind in kinds(events) if kind not in ("step_progress", "decode_progress", "heartbeat")]


def reason(found: event_pb2.JobEvent | job_pb2.Job) -> str:
    """The reason of the failure in an event, or of a job."""
    status = found.error if isinstance(found, job_pb2.Job) else getattr(found, found.WhichOneof("event")).status
    return next(unpack(one).reason for one in status.details if one.type_url.endswith("ErrorInfo"))


async def restarted(place: Place, life: Life, **changes: Any) -> Life:
    """The next server, after this one was killed."""
    await life.abandon()
    return await place.start(**changes)


async def stepping(life: Life, job_id: str) -> None:
    """Returns when a job takes its steps, and all that came before is committed."""
    await until(lambda: any(job_id in plan.step for plan in life.executor.plans))
    await life.engine.storage.journal.settled(job_id)


async def data(life: Life, artifact_id: str, **options: Any) -> bytes:
    """Downloads an output."""
    call = life.artifacts.DownloadArtifact(artifact_pb2.DownloadArtifactRequest(artifact_id=artifact_id, **options))
    return b"".join([message.chunk.data async for message in call])


async def edited(life: Life, *images: dict[str, Any]) -> job_pb2.Job:
    """A job that edits images, each given as the fields of a MediaInput."""
    request = generation_pb2.EditImageRequest(model="toy", prompt="bluer", images=images, sampling={"seed": 7})
    return (await life.jobs.CreateJob(job_pb2.CreateJobRequest(edit_image=request))).job


class Ticking:
    """What keeps a loop from a task that waits for a millisecond, in seconds, at worst: `busy` with its work, `late`
    for whatever reason. Other programs of a machine that is shared make it late, but not busy.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.late = 0.0

    async def __aenter__(self) -> Ticking:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            wall, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.busy = max(self.busy, time.thread_time() - used)
            self.late = max(self.late, time.perf_counter() - wall - 0.001)
