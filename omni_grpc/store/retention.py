"""How long finished jobs and their outputs are kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from omni_grpc.store.artifacts import Artifacts, delete_blobs
from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.job import Job
from omni_grpc.store.jobs import Jobs
from omni_grpc.store.journal import Journal
from omni_grpc.store.records import Cause, StoredJob
from omni_grpc.store.seam import Blobs, Store, StoreError, at_once

logger = logging.getLogger(__name__)

WATCHED_RETENTION = 5.0
"""Seconds after which an expired job that is still being read is looked at again."""
SWEEP = 1.0
"""Seconds between two looks for what has expired in the store."""
FORGET = 3600.0
"""Seconds between two looks for names that are remembered for too long."""
RECOUNT = 15.0
"""Seconds between two counts of what is kept, where other servers add to it and delete some too."""
SWEPT_AT_ONCE = 200
"""Most jobs that are deleted in one transaction."""
REMEMBERED = 7 * 24 * 3600.0
"""Seconds for which the store remembers the names of what is gone."""


class Retention:
    """Forgets jobs when their time is up, and earlier while outputs take more than `budget` bytes: then the oldest of
    the tenant that holds the most, so that no tenant's outputs drive out those of others.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        *,
        jobs: Jobs,
        artifacts: Artifacts,
        journal: Journal,
        forgotten: Forgotten,
        budget: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._jobs = jobs
        self._artifacts = artifacts
        self._journal = journal
        self._forgotten = forgotten
        self._budget = budget
        self._clock = clock
        self.on_forgotten: Callable[[Job], None] = lambda job: None
        """Called with each job that was removed from the store."""
        self._forgetting = asyncio.Lock()
        """Of one job, the outputs are counted once."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, job: Job) -> None:
        """A job has ended: its time runs from now on."""
        self._jobs.ended(job)
        if self._store.immediate:
            # elsewhere the sweep finds it: a timer would keep it in memory for days
            self._expire_in(job, job.record.spec.retention)
        if self._artifacts.size_bytes > self._budget:
            self._do(self._make_room())

    async def forget(self, jobs: Collection[Job], cause: Cause = Cause.EXPIRED) -> None:
        """Removes finished jobs with their events, outputs and inputs. Raises StoreError; they are as before then."""
        async with self._forgetting:
            for job in jobs:
                await self._journal.settled(job.id)
            names = [row for job in jobs for row in await self._outputs(job)]
            blobs = await self._store.jobs.delete([job.id for job in jobs], cause)
            for tenant, name, size in names:
                self._artifacts.gone(tenant, name, size, cause)
        for job in jobs:
            if (timer := self._timers.pop(job.id, None)) is not None:
                timer.cancel()
            self._jobs.drop(job)
            self._forgotten.add(job.id, cause, tenant=job.tenant)
            self.on_forgotten(job)
        await delete_blobs(self._blobs, blobs)

    async def _outputs(self, job: Job) -> list[tuple[str, str, int]]:
        rows = await self._store.files.artifacts(job_id=job.id, limit=1000)
        return [(row.tenant, row.artifact_id, row.size_bytes) for row in rows]

    async def sweep(self) -> None:
        """Forgets what has expired in the store, and what no row names."""
        while ids := await self._store.jobs.expired(self._clock(), SWEPT_AT_ONCE):
            found = [self._here(stored) for stored in await self._store.jobs.read(ids)]
            await self.forget(idle := [job for job in found if not job.watchers])
            if len(idle) < len(ids):
                return

    async def run(self) -> None:
        """Sweeps until it is cancelled."""
        forget_at, recount_at = 0.0, time.monotonic() + RECOUNT
        while True:
            await asyncio.sleep(SWEEP)
            try:
                await self.sweep()
                if time.monotonic() >= forget_at:
                    await self._store.files.forget_names(self._clock() - REMEMBERED)
                    forget_at = time.monotonic() + FORGET
                if self._store.shared and time.monotonic() >= recount_at:
                    await self._artifacts.count()
                    recount_at = time.monotonic() + RECOUNT
                if self._artifacts.size_bytes > self._budget:
                    await self._make_room()
            except StoreError as error:
                logger.warning("what has expired stays for now: %s", error)
            except Exception:
                logger.exception("unexpected error while looking for what has expired")

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def _make_room(self) -> None:
        if self._store.shared:
            # others may have made room already
            await self._artifacts.count()
        while self._artifacts.size_bytes > self._budget and (job := await self._oldest()) is not None:
            await self.forget([job])

    async def _oldest(self) -> Job | None:
        """The job whose outputs are the first to go; None where all are being read."""
        for tenant in sorted(self._artifacts.tenants, key=self._artifacts.artifact_bytes, reverse=True):
            ids = await self._store.jobs.oldest(tenant, SWEPT_AT_ONCE)
            for stored in await self._store.jobs.read(ids):
                if not (job := self._here(stored)).watchers:
                    return job
        return None

    def _here(self, stored: StoredJob) -> Job:
        job_id = stored.record.id
        return self._jobs.get(job_id) if job_id in self._jobs else Job.restored(stored)

    def _expire_in(self, job: Job, seconds: float) -> None:
        self._timers[job.id] = asyncio.get_running_loop().call_later(seconds, self._expire, job)

    def _expire(self, job: Job) -> None:
        del self._timers[job.id]
        if job.watchers:
            self._expire_in(job, WATCHED_RETENTION)
        elif job.id in self._jobs:
            self._do(self.forget([job]))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        if self._store.immediate:
            at_once(work)
            return
        task = asyncio.create_task(self._reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StoreError as error:
            logger.warning("what was to be deleted stays for now: %s", error)
        except Exception:
            logger.exception("unexpected error while deleting")
