"""What a server keeps, as one thing: jobs, outputs and uploads over a store of rows and one of bytes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from omni_grpc.config import EngineConfig
from omni_grpc.store.artifacts import Artifacts
from omni_grpc.store.assets import Assets
from omni_grpc.store.clock import Clock
from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.job import Job
from omni_grpc.store.jobs import Jobs
from omni_grpc.store.journal import Journal
from omni_grpc.store.memory import MemoryBlobs, MemoryStore
from omni_grpc.store.records import Cause
from omni_grpc.store.retention import Retention
from omni_grpc.store.seam import Blobs, Store, StoreError
from omni_grpc.types.errors import FailedPrecondition
from omni_grpc.types.storage_info import StorageInfo

logger = logging.getLogger(__name__)

ASSET_SWEEP = 30.0
"""Seconds between two sweeps for expired assets, on a server without uploads."""
ORPHAN_SWEEP = 6 * 3600.0
"""Seconds between two looks for bytes that no row names."""
ORPHAN_AGE = 3600.0
"""Seconds after which bytes that no row names are nobody's."""
ORPHANS_AT_ONCE = 500
"""Names that are looked up in one query."""
LAST_WRITES, LEAST_LAST_WRITES = 10.0, 1.0
"""Seconds that the last events may take to be committed when a server stops, and those of them that are left for what
came meanwhile.
"""


class Storage:
    """Made before any engine, and closed after all of them. It belongs to one event loop. Without a store, all that it
    keeps is gone with the process.
    """

    def __init__(self, config: EngineConfig, store: Store | None = None, blobs: Blobs | None = None) -> None:
        self.store: Store = MemoryStore() if store is None else store
        self.blobs: Blobs = MemoryBlobs() if blobs is None else blobs
        self._limits = config.keeping
        self.clock = Clock()
        self.instance_id = secrets.token_hex(8)
        """Names this life of the server process."""
        self.forgotten = Forgotten(self.instance_id, durable=self.store.durable)
        self.journal = Journal(
            self.store.jobs, server=self.instance_id, immediate=self.store.immediate, clock=self.clock
        )
        self.jobs = Jobs(self.store, self.journal, self.forgotten, self.clock)
        self.artifacts = Artifacts(self.store.files, self.blobs, self.forgotten)
        self.assets = Assets(
            self.store.files,
            self.blobs,
            self.forgotten,
            budget=config.keeping.asset_budget,
            retention=config.jobs.asset_retention,
            clock=self.clock,
        )
        self.retention = Retention(
            self.store,
            self.blobs,
            jobs=self.jobs,
            artifacts=self.artifacts,
            journal=self.journal,
            forgotten=self.forgotten,
            budget=config.keeping.artifact_budget,
            clock=self.clock,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._last_writes: float | None = None
        """When, by time.monotonic(), the last events have had their time."""

    @property
    def durable(self) -> bool:
        """Whether jobs outlive the process."""
        return self.store.durable

    @property
    def info(self) -> StorageInfo:
        """Where things are kept and for how long, as anybody may know."""
        return StorageInfo(
            durable=self.store.durable and self.blobs.durable,
            shared=self.store.shared,
            rows=self.store.kind,
            files=self.blobs.kind,
            retention=self._limits.retention,
            max_retention=self._limits.max_retention,
            artifact_budget_bytes=self._limits.artifact_budget,
            asset_budget_bytes=self._limits.asset_budget,
        )

    async def open(self) -> None:
        """Connects, and starts to write and to sweep; nothing where that has been done. Raises ConfigError for a store
        that cannot be used.
        """
        if self._tasks:
            return
        await self.store.open()
        try:
            if self.store.shared:
                self.clock.set(await self.store.servers.now())
            await self.blobs.open()
            await self.artifacts.count()
            await self.assets.count()
        except BaseException:
            # nobody closes what was not opened
            await self.store.close()
            raise
        self.journal.start()
        self._tasks = [
            asyncio.create_task(self.retention.run(), name="omni_grpc-retention"),
            asyncio.create_task(self._sweep(), name="omni_grpc-sweep"),
        ]

    async def close(self) -> None:
        """Writes what waits, and lets go of the store."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.retention.stop()
        await self.finish()
        await self.blobs.close()
        await self.store.close()

    async def written(self) -> None:
        """Returns when all that has happened is committed, so that watchers can see it, or after LAST_WRITES."""
        self._last_writes = time.monotonic() + LAST_WRITES
        await self.journal.written(LAST_WRITES)

    async def finish(self) -> None:
        """Writes what waits, as far as the store takes it. Nothing is written after that."""
        left = LAST_WRITES if self._last_writes is None else self._last_writes - time.monotonic()
        try:
            await self.journal.stop(max(LEAST_LAST_WRITES, left))
        except StoreError as error:
            logger.error("the last events of jobs were not written: %s", error)

    async def delete(self, job: Job) -> None:
        """Forgets a finished job with its events and outputs. Raises FailedPrecondition while it runs."""
        if not job.state.terminal:
            raise FailedPrecondition(f"job {job.id} is {job.state}; cancel it first", reason="JOB_NOT_FINISHED")
        await self.retention.forget([job], Cause.DELETED)

    async def _sweep(self) -> None:
        next_orphans = 0.0
        while True:
            await asyncio.sleep(ASSET_SWEEP)
            try:
                await self.assets.sweep()
                if self.store.shared:
                    await self.assets.count()
                if self.durable and time.monotonic() >= next_orphans:
                    next_orphans = time.monotonic() + ORPHAN_SWEEP
                    await self.sweep_orphans()
            except StoreError as error:
                logger.warning("what nobody needs stays for now: %s", error)
            except Exception:
                logger.exception("unexpected error while looking for what nobody needs")

    async def sweep_orphans(self, age: float = ORPHAN_AGE) -> int:
        """Deletes bytes that no row names, of a put whose job or upload never came to be, and says how many. `age`:
        seconds since it was put; a row may be on its way. Nothing while rows cannot be written.
        """
        if self.journal.failure is not None:
            return 0
        found = [name async for name in self.blobs.names("", self.clock.earliest() - age)]
        swept = 0
        for start in range(0, len(found), ORPHANS_AT_ONCE):
            some = found[start : start + ORPHANS_AT_ONCE]
            owned = await self.store.files.owned(some)
            await self.blobs.delete(orphans := [name for name in some if name not in owned])
            swept += len(orphans)
        if swept:
            logger.info("%d files that belonged to nothing are deleted", swept)
        return swept
