"""Commits what happens to jobs, many at a time, and shows it once it is committed.

The loop never waits for a disk. Events are appended by the engine, collected here and written by one task, as many as
have come while the write before was under way (group commit). A job's events become visible in their order: those that
change its state once they are committed; progress, which is not kept, as soon as all before it is visible.

While the store cannot be written, new jobs are refused; what happens to those that are here is kept in memory,
invisible, until it can.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from omni_grpc.store.job import PROGRESS, Job, advanced
from omni_grpc.store.records import ArtifactRow, Cause, Delivery, Entry, JobRecord, JobWrite, Rejected, StoredJob
from omni_grpc.store.seam import JobRows, StoreError, at_once
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.events import ArtifactReady

logger = logging.getLogger(__name__)

RESERVED = 256
"""Seqs of progress that may be shown beyond the last one that is committed."""
BATCH = 64
"""Jobs in one transaction: what is encoded for it at once must not hold up the loop."""
GATHER = 0.005
"""Seconds that a transaction waits for more jobs, where the one before it had more than one: it costs as much as ten
jobs in it.
"""
FIRST_RETRY, MAX_RETRY = 0.1, 5.0
"""Seconds between two tries to write: doubled each time."""


class Taken(Exception):
    """Another job of the tenant, made by another server or before, has this request_id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


@dataclasses.dataclass(slots=True)
class Line:
    """What of one job has not been shown yet, and what of that is to be written. `record` is as the job will be then;
    `written` is the last seq that the write under way has.
    """

    job: Job
    record: JobRecord
    created: asyncio.Future[None] | None = None
    waiting: collections.deque[Entry] = dataclasses.field(default_factory=collections.deque)
    unwritten: list[Entry] = dataclasses.field(default_factory=list)
    owed: list[Delivery] = dataclasses.field(default_factory=list)
    dirty: bool = False
    written: int = 0


class Journal:
    """The only writer of a server's jobs. `on_lost` is told of jobs that another server has taken over and of new ones
    that are not kept, `on_written` of jobs whose log has grown in the store, `on_progress` of events that are not kept,
    once they are shown. `owed` says who is to be told that a job has entered its state, and `on_owed` is told when that
    is committed.
    """

    def __init__(self, rows: JobRows, *, server: str, immediate: bool, clock: Callable[[], float] = time.time) -> None:
        self._rows = rows
        self._server = server
        self._immediate = immediate
        self._clock = clock
        self._lines: dict[str, Line] = {}
        self._dirty: dict[str, Line] = {}
        self._withdrawn: list[str] = []
        self._reserved: dict[str, int] = {}
        """By job: the last seq that may be shown without a write."""
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._together = 0
        """Jobs in the newest transaction."""
        self._pause = 0.0
        self._failed_at = 0.0
        self.failure: StoreError | None = None
        """Why the last write was not done."""
        self.on_lost: Callable[[Job], None] = lambda job: None
        self.owed: Callable[[Job], tuple[Delivery, ...]] = lambda job: ()
        self.on_owed: Callable[[], None] = lambda: None
        self.on_written: Callable[[Job, int], None] = lambda job, seq: None
        self.on_progress: Callable[[Job, Entry], None] = lambda job, entry: None

    # --- what engines do ----------------------------------------------------------------------------------------------

    def create(self, job: Job) -> None:
        """A job that the store does not have yet. Its first event is to follow."""
        job.clock = self._clock
        job.record = dataclasses.replace(job.record, server=self._server, create_time=self._clock())
        job.journal = self.append
        line = self._lines[job.id] = Line(job, job.record)
        if not self._immediate:
            line.created = job.committed = asyncio.get_running_loop().create_future()

    def adopt(self, job: Job) -> None:
        """A job that the store has, and that is this server's from now on."""
        job.journal, job.clock = self.append, self._clock
        self._reserved[job.id] = job.appended_seq

    def append(self, job: Job, entry: Entry) -> None:
        """An event of a job that was created or adopted here."""
        line = self._lines.get(job.id)
        if self._immediate:
            self._append_now(job, entry, created=self._lines.pop(job.id, None) is not None)
            return
        progress = isinstance(entry.event, PROGRESS)
        if progress and line is None and entry.seq <= self._reserved.get(job.id, 0):
            self._reveal(job, entry)
            if entry.seq > self._reserved[job.id] - RESERVED // 2:
                self._write_soon(self._line(job))
            return
        line = self._line(job)
        line.waiting.append(entry)
        if not progress:
            line.unwritten.append(entry)
            line.record = self._advance(job, line.record, line.waiting, line.owed)
        # progress at the front of what waits need not wait
        self._show(line, 0)
        if not progress or entry.seq > self._reserved.get(job.id, 0):
            self._write_soon(line)

    async def acknowledged(self, job: Job) -> None:
        """Returns when a job that was created here is committed. Raises StoreError or Taken where it is not: nothing of
        it is kept then.
        """
        if job.committed is not None:
            await asyncio.shield(job.committed)

    def check(self) -> None:
        """Raises Unavailable (STORE_UNAVAILABLE) while nothing can be written. Once in a while a new job may try."""
        if self.failure is not None and (self._dirty or time.monotonic() < self._failed_at + self._pause):
            raise refusal(self.failure, self._pause)

    @property
    def unwritten(self) -> int:
        """Jobs of which something has not been written yet."""
        return len(self._lines)

    def creating(self, job_id: str) -> bool:
        """Whether a new job is not committed yet: there is none for anybody but its maker."""
        line = self._lines.get(job_id)
        return line is not None and line.created is not None and not line.created.done()

    def withdrawn(self, job_id: str) -> bool:
        """Whether a job was refused that the store may have all the same: it is about to be deleted there."""
        return job_id in self._withdrawn

    async def settled(self, job_id: str) -> None:
        """Returns when all that happened to a job is committed. Raises StoreError where it cannot be now."""
        while job_id in self._lines:
            if self.failure is not None:
                raise self.failure
            self._settled.clear()
            await self._settled.wait()

    # --- the writer ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if not self._immediate and self._task is None:
            self._task = asyncio.create_task(self._run(), name="omni_grpc-journal")

    async def written(self, timeout: float) -> None:
        """Returns when all that has happened is committed and shown, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._task is not None and (self._lines or self._withdrawn) and time.monotonic() < deadline:
            self._wake.set()
            await asyncio.sleep(0.005)

    async def stop(self, timeout: float) -> None:
        """Writes what waits, for `timeout` seconds at most. Raises StoreError where that is not all."""
        if self._task is None:
            return
        await self.written(timeout)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._lines or self._withdrawn:
            raise self.failure or StoreError(f"{len(self._lines)} jobs were not written in {timeout:g} s")

    def _write_soon(self, line: Line) -> None:
        line.dirty = True
        self._dirty[line.job.id] = line
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty or self._withdrawn:
                if self._together > 1:
                    # where several come at a time, more of them are about to
                    await asyncio.sleep(GATHER)
                batch = [self._dirty.pop(job_id) for job_id in list(self._dirty)[:BATCH]]
                self._together = len(batch)
                try:
                    await self._write(batch)
                except StoreError as error:
                    self._not_written(batch, error)
                    await asyncio.sleep(self._pause)
                except Exception:
                    logger.exception("unexpected error while writing %d jobs", len(batch))
                    await self._write_singly(batch)
                else:
                    self._pause, self.failure = 0.0, None

    async def _write_singly(self, batch: list[Line]) -> None:
        """Of jobs that could not be written together, those that cannot be written alone are given up: they would keep
        all others from it.
        """
        for line in batch:
            try:
                await self._write([line])
            except StoreError as error:
                self._not_written([line], error)
            except Exception as error:
                logger.exception("job %s cannot be written", line.job.id)
                if line.created is not None and not line.created.done():
                    line.created.set_exception(error)
                    line.created.exception()
                self._drop(line.job.id)
                self._lose(line.job)

    async def _write(self, batch: list[Line]) -> None:
        if self._withdrawn:
            withdrawn = list(self._withdrawn)
            await self._rows.delete(withdrawn, Cause.DELETED)
            del self._withdrawn[: len(withdrawn)]
        if not batch:
            return
        writes = [self._taken_out(line) for line in batch]
        rejected = await self._rows.write(writes)
        for line, write in zip(batch, writes, strict=True):
            self._written(line, write, rejected)
        self._settled.set()

    def _taken_out(self, line: Line) -> JobWrite:
        """What is to be written of a job. It is dirty again with whatever comes from here on."""
        line.dirty = False
        line.written = line.waiting[-1].seq if line.waiting else line.job.appended_seq
        record = line.record = dataclasses.replace(line.record, reserved_seq=line.job.appended_seq + RESERVED)
        return JobWrite(
            record=record,
            entries=tuple(line.unwritten),
            artifacts=tuple(filter(None, (artifact_row(record, entry) for entry in line.unwritten))),
            deliveries=tuple(line.owed),
            created=line.created is not None and not line.created.done(),
        )

    def _written(self, line: Line, write: JobWrite, rejected: Rejected) -> None:
        job_id = line.job.id
        if job_id in rejected.lost:
            self._drop(job_id)
            self._lose(line.job)
            return
        if (other := rejected.taken.get(job_id)) is not None:
            assert line.created is not None
            line.created.set_exception(Taken(other))
            # read by `acknowledged`, if anybody still waits
            line.created.exception()
            self._drop(job_id)
            self._lose(line.job)
            return
        self._reserved[job_id] = write.record.reserved_seq
        del line.unwritten[: len(write.entries)]
        del line.owed[: len(write.deliveries)]
        if write.deliveries:
            self.on_owed()
        if line.created is not None and not line.created.done():
            line.created.set_result(None)
        self._show(line, line.written)
        if write.entries:
            self.on_written(line.job, write.entries[-1].seq)
        if not line.waiting and not line.dirty:
            self._lines.pop(job_id, None)
            if line.job.ended:
                self._reserved.pop(job_id, None)

    def _not_written(self, batch: list[Line], error: StoreError) -> None:
        if self.failure is None:
            logger.error("jobs cannot be written: %s", error)
        self.failure, self._failed_at = error, time.monotonic()
        self._pause = min(MAX_RETRY, max(FIRST_RETRY, self._pause * 2))
        for line in batch:
            if line.created is not None and not line.created.done():
                line.created.set_exception(error)
                line.created.exception()
                self._drop(line.job.id)
                # it may be there all the same: a commit whose answer was lost
                self._withdrawn.append(line.job.id)
                # whoever made it may have left, and does not wait for it
                self._lose(line.job)
            else:
                line.dirty = True
                self._dirty[line.job.id] = line
        self._settled.set()

    # --- parts --------------------------------------------------------------------------------------------------------

    def _line(self, job: Job) -> Line:
        line = self._lines.get(job.id)
        if line is None:
            line = self._lines[job.id] = Line(job, job.record)
        return line

    def _show(self, line: Line, written: int) -> None:
        """Shows what may be seen: what is written, and the progress behind it up to the next event that is not."""
        reserved = self._reserved.get(line.job.id, 0)
        while line.waiting:
            entry = line.waiting[0]
            if entry.seq > written and not (isinstance(entry.event, PROGRESS) and entry.seq <= reserved):
                return
            self._reveal(line.job, line.waiting.popleft())

    def _reveal(self, job: Job, entry: Entry) -> None:
        job.show(entry)
        if isinstance(entry.event, PROGRESS):
            self.on_progress(job, entry)

    def _append_now(self, job: Job, entry: Entry, *, created: bool) -> None:
        owed: list[Delivery] = []
        record = self._advance(job, job.record, (entry,), owed)
        row = artifact_row(record, entry)
        write = JobWrite(
            record=record,
            entries=(entry,),
            artifacts=(row,) if row else (),
            deliveries=tuple(owed),
            created=created,
        )
        at_once(self._rows.write([write]))
        job.show(entry)
        if owed:
            self.on_owed()

    def _advance(self, job: Job, record: JobRecord, waiting: Sequence[Entry], owed: list[Delivery]) -> JobRecord:
        """The record once the last of the events that wait has happened, and what is owed for that."""
        after = advanced(record, waiting[-1])
        first = not job.entries and len(waiting) == 1
        if after.spec.webhook is not None and (after.state is not record.state or first):
            # as it will be when this is committed
            try:
                owed.extend(self.owed(Job.restored(StoredJob(after, (*job.entries, *waiting)))))
            except Exception:
                # the job goes on: it is not at fault
                logger.exception("nobody is told that job %s is %s", job.id, after.state)
        return after

    def _lose(self, job: Job) -> None:
        """What goes wrong for one job must not keep the others from being written."""
        try:
            self.on_lost(job)
        except Exception:
            logger.exception("unexpected error while letting go of job %s", job.id)

    def _drop(self, job_id: str) -> None:
        if (line := self._lines.pop(job_id, None)) is not None:
            # until its engine knows, more may come
            line.job.journal = _discard
        self._dirty.pop(job_id, None)
        self._reserved.pop(job_id, None)
        self._settled.set()


def artifact_row(record: JobRecord, entry: Entry) -> ArtifactRow | None:
    """The row of the output that an event announces."""
    if not isinstance(entry.event, ArtifactReady):
        return None
    artifact = entry.event.artifact
    return ArtifactRow(
        artifact_id=artifact.artifact_id,
        job_id=record.id,
        tenant=record.tenant,
        size_bytes=artifact.size_bytes,
        create_time=entry.time,
    )


def refusal(error: StoreError, pause: float = 1.0) -> Unavailable:
    """What a caller is told whose job cannot be kept."""
    return Unavailable(
        f"jobs cannot be stored at the moment: {error}", reason="STORE_UNAVAILABLE", retry_after=max(1.0, pause)
    )


def _discard(job: Job, entry: Entry) -> None:
    """The journal of a job that is not this server's any more."""
