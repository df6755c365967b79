"""Several servers on one store: signs of life, jobs of servers that are gone, and what servers tell each other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from omni_grpc.engine import Entry, Job
from omni_grpc.fleet import Fleet
from omni_grpc.gate.recovery import Recovery
from omni_grpc.store.records import JobQuery, JobState
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

    def __init__(self, fleet: Fleet, recovery: Recovery) -> None:
        self._fleet = fleet
        self._recovery = recovery
        self._store = fleet.storage.store
        self._me = fleet.storage.instance_id
        self._lease = fleet.config.store.lease_seconds
        self._notices: dict[tuple[str, str], Notice] = {}
        self._told = asyncio.Event()
        self._others = False
        self.on_adapters: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Called when other servers may have loaded or unloaded adapters."""
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Says that this server is alive, and takes what servers have left that are not. Raises StoreError."""
        if not self._store.durable:
            return
        await self._beat()
        journal = self._fleet.storage.journal
        journal.on_lost = self._fleet.let_go
        if self._store.shared:
            journal.on_written = lambda job, seq: self._tell("seq", Notice(job_id=job.id, seq=seq))
            journal.on_progress = self._tell_progress
            self._fleet.storage.retention.on_forgotten = self._deleted
            self._store.servers.listen(self._hear)
            self._tasks = [
                asyncio.create_task(self._every(self._lease / 4, self._beat), name="omni_grpc-lease"),
                asyncio.create_task(self._every(LOOK, self._look), name="omni_grpc-look"),
                asyncio.create_task(self._send(), name="omni_grpc-notices"),
            ]

    async def stop(self) -> None:
        """What this server still has may be taken at once."""
        self._stopped = True
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
        ahead = self._fleet.queue_position(job)
        if not self._store.shared:
            return ahead
        record = job.record
        query = JobQuery(states=(JobState.QUEUED,), model=record.model, created_before=record.create_time)
        try:
            if job.id in self._fleet.jobs:
                return ahead + (await self._store.jobs.queued_before(record) if self._others else 0)
            return await self._store.jobs.count(query)
        except StoreError as error:
            # a job that is known is not refused for the want of an estimate
            logger.warning("the queue of the other servers is not known: %s", error)
            return ahead

    async def cancel(self, job: Job, reason: str) -> None:
        """Has another server stop a job. Returns when it has, or after a few seconds; at once for a job that this
        server has left to the next.
        """
        record = await self._store.jobs.request_cancel(job.id, reason)
        if job.released and record is not None:
            job.record = dataclasses.replace(job.record, cancel_reason=record.cancel_reason)
        if job.released or record is None:
            return
        await self._refresh(job)
        if job.state.terminal:
            return
        self._tell("cancel", Notice(job_id=job.id, cancel=True))
        with contextlib.suppress(TimeoutError), self._fleet.watching(job):
            async with asyncio.timeout(CANCEL_WAIT):
                while not (job.state.terminal or job.gone or job.released):
                    await job.wait(job.last_seq)

    def watched(self, job: Job) -> None:
        """Somebody begins to watch a job here: its server, if it is another one, need not wait for the next look."""
        if self._fleet.jobs.followed(job.id) is job:
            self._tell("watched", Notice(job_id=job.id, watched=True))

    def tell_adapters(self) -> None:
        """The adapters that the store has are others now."""
        self._tell("adapters", Notice(job_id="", adapters=True))

    # --- what this server does ----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        now = await self._store.servers.now()
        if self._store.shared:
            self._fleet.storage.clock.set(now)
        if not await self._store.servers.beat(self._me, now, now + self._lease) and self._tasks:
            await self._find_lost()
        if self._fleet.takes_over:
            models = [engine.checkpoint.name for engine in self._fleet.engines] if self._store.shared else ()
            self._recovery.take(await self._store.servers.take_over(self._me, now, models=models))
        self._others = self._store.shared and len(await self._store.servers.alive(now)) > 1
        if self._others and self._tasks and self.on_adapters is not None:
            await self.on_adapters()

    async def _find_lost(self) -> None:
        """This server was thought dead, and others have taken its jobs."""
        # those that are made meanwhile are this server's
        here = [job for job in self._fleet.jobs.newest() if not job.ended]
        mine = set(await self._store.jobs.unfinished(self._me))
        lost = [job for job in here if job.id not in mine and not job.ended]
        logger.error("this server gave no sign of life for %g s: others have taken %d jobs", self._lease, len(lost))
        for job in lost:
            self._fleet.let_go(job)

    async def _look(self) -> None:
        for job_id, reason in await self._store.jobs.cancelled(self._me):
            if job_id in self._fleet.jobs:
                self._fleet.cancel(job_id, reason)
        for job in self._fleet.jobs.elsewhere:
            if job.watchers:
                self._tell("watched", Notice(job_id=job.id, watched=True))
                await self._refresh(job)

    async def _refresh(self, job: Job, progress: Entry | None = None) -> None:
        """Shows what the store has of a job of another server, and then what is not kept."""
        found = await self._store.jobs.read([job.id])
        if self._fleet.jobs.followed(job.id) is not job:
            # it has come here meanwhile
            return
        for stored in found:
            job.catch_up(stored)
        if not found:
            job.vanish()
        if progress is not None:
            _show_progress(job, progress)

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

    def _tell_progress(self, job: Job, entry: Entry) -> None:
        # whoever hears it shows what was before it first
        self._tell("progress", Notice(job_id=job.id, seq=job.kept_seq, progress=entry))

    def _deleted(self, job: Job) -> None:
        self._tell("gone", Notice(job_id=job.id, gone=True))

    def _hear(self, notice: Notice) -> None:
        if self._stopped:
            return
        if notice.adapters and self.on_adapters is not None:
            self._soon(self.on_adapters())
        elif notice.job_id in self._fleet.jobs:
            self._hear_of_mine(self._fleet.jobs.get(notice.job_id), notice)
        elif (job := self._fleet.jobs.followed(notice.job_id)) is not None:
            self._hear_of_another(job, notice)

    def _hear_of_mine(self, job: Job, notice: Notice) -> None:
        if notice.gone and job.ended:
            self._fleet.jobs.drop(job)
        elif notice.cancel:
            self._soon(self._look())
        elif notice.watched:
            with self._fleet.watching(job):
                # its disconnect grace begins again
                pass

    def _hear_of_another(self, job: Job, notice: Notice) -> None:
        if notice.gone:
            job.vanish()
        elif notice.seq > job.kept_seq:
            self._soon(self._refresh(job, notice.progress))
        elif notice.progress is not None:
            _show_progress(job, notice.progress)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_reported(work))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)


async def _reported(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StoreError as error:
        logger.warning("the store is away: %s", error)
    except Exception:
        # it is tried again: a server that says no more that it is alive loses its jobs
        logger.exception("unexpected error in what servers do together")


def _show_progress(job: Job, entry: Entry) -> None:
    if entry.seq > job.last_seq and not job.state.terminal:
        job.show(entry)
