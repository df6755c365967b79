"""Several servers on one store: signs of life, jobs of servers that are gone, and what servers tell each other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from omni_grpc.engine import Engine, Job
from omni_grpc.gate.recovery import Recovery
from omni_grpc.store.records import Entry, JobQuery, JobState
from omni_grpc.store.seam import Notice, StoreError

logger = logging.getLogger(__name__)

TELL = 0.1
"""Least seconds between two messages to other servers: what comes in between travels together."""
LOOK = 1.0
"""Seconds between two looks at the jobs of other servers that somebody here watches, and for jobs of this server that
are to be stopped: what a notice that did not arrive would have told.
"""
CANCEL_WAIT = 5.0
"""Seconds that another server gets to stop a job, before the caller is told that it is on its way."""


class Sharing:
    """One server's part in it. Without other servers, its name in the store alone."""

    def __init__(self, engine: Engine, recovery: Recovery) -> None:
        self._engine = engine
        self._recovery = recovery
        self._store = engine.storage.store
        self._me = engine.storage.instance_id
        self._lease = engine.config.store.lease_seconds
        self._notices: dict[tuple[str, str], Notice] = {}
        self._told = asyncio.Event()
        self._others = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Says that this server is alive, and takes what servers have left that are not. Raises StoreError."""
        if not self._store.durable:
            return
        await self._beat()
        journal = self._engine.storage.journal
        journal.on_lost = self._engine.let_go
        if self._store.shared:
            journal.on_written = lambda job, seq: self._tell("seq", Notice(job_id=job.id, seq=seq))
            journal.on_progress = self._tell_progress
            self._store.servers.listen(self._hear)
            self._tasks = [
                asyncio.create_task(self._every(self._lease / 4, self._beat), name="omni_grpc-lease"),
                asyncio.create_task(self._every(LOOK, self._look), name="omni_grpc-look"),
                asyncio.create_task(self._send(), name="omni_grpc-notices"),
            ]

    async def stop(self) -> None:
        """What this server still has may be taken at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store.durable:
            try:
                await self._store.servers.leave(self._me)
            except StoreError as error:
                logger.warning("the others learn in %g s that this server has ended: %s", self._lease, error)

    async def queue_position(self, job: Job) -> int:
        """The number of jobs of any server that leave the queue before this one; 0 once it has left the queue."""
        if job.state is not JobState.QUEUED:
            return 0
        ahead = self._engine.queue_position(job)
        if job.id in self._engine.jobs:
            return ahead + (await self._store.jobs.queued_before(job.record) if self._others else 0)
        if self._store.shared:
            record = job.record
            query = JobQuery(states=(JobState.QUEUED,), model=record.model, created_before=record.create_time)
            return await self._store.jobs.count(query)
        return ahead

    async def cancel(self, job: Job, reason: str) -> None:
        """Has another server stop a job. Returns when it has, or after a few seconds."""
        record = await self._store.jobs.request_cancel(job.id, reason)
        if record is None or record.state.terminal:
            return
        job.record = record
        self._tell("cancel", Notice(job_id=job.id, cancel=True))
        with contextlib.suppress(TimeoutError), self._engine.watching(job):
            async with asyncio.timeout(CANCEL_WAIT):
                while not job.state.terminal:
                    await job.wait(job.last_seq)

    def deleted(self, job: Job) -> None:
        """Tells the others that a job is gone."""
        if self._store.shared:
            self._tell("gone", Notice(job_id=job.id, gone=True))

    # --- what this server does ----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        now = time.time()
        if not await self._store.servers.beat(self._me, now, now + self._lease) and self._tasks:
            await self._find_lost()
        model = self._engine.checkpoint.name if self._store.shared else ""
        self._recovery.take(await self._store.servers.take_over(self._me, now, model=model))
        self._others = self._store.shared and len(await self._store.servers.alive(now)) > 1

    async def _find_lost(self) -> None:
        """This server was thought dead, and others have taken its jobs."""
        # looked at first: one that is made meanwhile is not in the answer, and is not lost
        held = self._engine.jobs.newest()
        mine = set(await self._store.jobs.unfinished(self._me))
        lost = [job for job in held if not job.ended and job.id not in mine]
        logger.error("this server gave no sign of life for %g s: others have taken %d jobs", self._lease, len(lost))
        for job in lost:
            self._engine.let_go(job)

    async def _look(self) -> None:
        for job_id, reason in await self._store.jobs.cancelled(self._me):
            if job_id in self._engine.jobs:
                self._engine.cancel(job_id, reason)
        for job in self._engine.jobs.elsewhere:
            if job.watchers:
                self._tell("watched", Notice(job_id=job.id, watched=True))
                await self._refresh(job)

    async def _refresh(self, job: Job, progress: Entry | None = None) -> None:
        """Shows what the store has of a job of another server, and then the progress that was told of meanwhile."""
        for stored in await self._store.jobs.read([job.id]):
            if job.id in self._engine.jobs:
                # it has been taken over meanwhile, and goes its own way
                return
            job.catch_up(stored)
            if progress is not None and progress.seq > job.last_seq and not job.state.terminal:
                job.show(progress)

    async def _every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await _reported(work())

    # --- notices ------------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, notice: Notice) -> None:
        """The newest of a kind about a job is enough."""
        if self._others:
            self._notices[notice.job_id, kind] = notice
            self._told.set()

    def _tell_progress(self, job: Job, entry: Entry) -> None:
        self._tell("progress", Notice(job_id=job.id, seq=job.kept_seq, progress=entry))

    async def _send(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            notices, self._notices = list(self._notices.values()), {}
            try:
                await self._store.servers.tell(notices)
            except StoreError as error:
                # whoever waits for one looks at the rows too
                logger.warning("the other servers are not told: %s", error)
            await asyncio.sleep(TELL)

    def _hear(self, notice: Notice) -> None:
        if notice.job_id in self._engine.jobs:
            self._hear_of_mine(self._engine.jobs.get(notice.job_id), notice)
        elif (job := self._engine.jobs.followed(notice.job_id)) is not None:
            self._hear_of_another(job, notice)

    def _hear_of_mine(self, job: Job, notice: Notice) -> None:
        if notice.gone and job.ended:
            self._engine.jobs.drop(job)
        elif notice.cancel:
            self._soon(self._look())
        elif notice.watched:
            with self._engine.watching(job):
                # its disconnect grace begins again
                pass

    def _hear_of_another(self, job: Job, notice: Notice) -> None:
        if notice.progress is not None and notice.progress.seq > job.last_seq and not job.state.terminal:
            if notice.seq <= job.kept_seq:
                job.show(notice.progress)
            else:
                # what happened before it is not here yet, and would be left out behind it
                self._soon(self._refresh(job, notice.progress))
        elif notice.seq > job.last_seq:
            self._soon(self._refresh(job))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_reported(work))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)


async def _reported(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StoreError as error:
        logger.warning("the store is away: %s", error)
