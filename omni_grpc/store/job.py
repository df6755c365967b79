"""A job with its event log, as this server has it."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence

from omni_grpc.store.records import Entry, JobRecord, JobSpec, JobState, StoredJob
from omni_grpc.types.errors import FailedPrecondition, Failure
from omni_grpc.types.events import (
    TERMINAL,
    ArtifactReady,
    Cancelled,
    Completed,
    DecodeProgress,
    Event,
    Failed,
    Preempted,
    Resumed,
    Retrying,
    Started,
    StepProgress,
)
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.request import Request
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats

PROGRESS = (StepProgress, DecodeProgress)
"""Events that change no state: a store that outlives the process does not keep them."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no letter that reads as a digit."""


def new_job_id() -> str:
    """Sorts by creation: 50 bits of milliseconds, then 80 random bits."""
    value = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "job_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -5, -5))


def new_record(spec: JobSpec, **more: object) -> JobRecord:
    """The record of a job that has just been accepted. `more`: its other fields."""
    request = spec.request
    return JobRecord(
        id=request.id,
        spec=spec,
        model=request.model,
        task=request.task,
        state=JobState.QUEUED,
        create_time=time.time(),
        **more,  # type: ignore[arg-type]
    )


def advanced(record: JobRecord, entry: Entry) -> JobRecord:
    """The record of a job once this event has happened. The only place where events become states."""
    match entry.event:
        case Started():
            return dataclasses.replace(record, state=JobState.RUNNING, start_time=entry.time)
        case Retrying():
            return dataclasses.replace(record, state=JobState.QUEUED, start_time=None)
        case Preempted():
            return dataclasses.replace(record, state=JobState.PREEMPTED)
        case Resumed():
            return dataclasses.replace(record, state=JobState.RUNNING)
        case Completed():
            state = JobState.SUCCEEDED
        case Failed():
            state = JobState.FAILED
        case Cancelled(reason=reason):
            state, record = JobState.CANCELLED, dataclasses.replace(record, cancel_reason=reason)
        case _:
            return record
    return dataclasses.replace(record, state=state, end_time=entry.time, expire_time=entry.time + record.spec.retention)


class Job:
    """The record of one request and its log: whoever watches it sees what has been shown.

    It belongs to one event loop. An event is appended by the engine that runs the job, and shown once it is committed;
    without a journal at once. Seqs grow from 1; those of events that are not kept are missing after a restart.
    """

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.request: Request = record.spec.request
        """With its inputs, until it has ended."""
        self.warnings: tuple[RequestWarning, ...] = record.spec.warnings
        self.step = 0
        self.eta: float | None = None
        self.artifacts: tuple[Artifact, ...] = ()
        """What it has made, once it has succeeded."""
        self.outputs: dict[Artifact, float] = {}
        """The outputs that are stored so far, by index, with the time of each."""
        self.effective: Effective | None = None
        self.failure: Failure | None = None
        self.stats: Stats | None = None
        self.watchers = 0
        self.previews: tuple[PreviewImage, ...] = ()
        self.preview_seq = 0
        """The seq of the step event that the newest previews belong to. Older ones are not kept."""
        self.committed: asyncio.Future[None] | None = None
        """Whether it is in its store, where that takes time: done once it is, or once it is known that it is not."""
        self.ended = False
        """Its last event was appended, and may not be committed yet."""
        self.journal: Callable[[Job, Entry], None] = Job.show
        self.clock: Callable[[], float] = time.time
        """The time of what is appended; that of its server, once it has one."""
        """Where appended events go: it shows them."""
        self.on_end: Callable[[Job], None] = lambda job: None
        """Called when its last event has been shown."""
        self.released = False
        """Its server has stopped and left it as it is: whoever watches it comes back when it runs again."""
        self.gone = False
        """It was deleted by another server: nothing more comes."""
        self.kept_seq = 0
        """The seq of the newest shown event that a store keeps."""
        self.handed: float | None = None
        """When its outputs were handed over to be stored, in Unix seconds; None where this server has not done that."""
        self.starts: list[float] = []
        """When it was started, each time, in Unix seconds."""
        self._appended = 0
        self._entries: list[Entry] = []
        self._waiters: set[asyncio.Future[None]] = set()

    @classmethod
    def restored(cls, stored: StoredJob) -> Job:
        """A job as it is kept."""
        job = cls(stored.record)
        job.catch_up(stored)
        return job

    # --- its record -------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def tenant(self) -> str:
        return self.record.tenant

    @property
    def state(self) -> JobState:
        return self.record.state

    @property
    def segments(self) -> int:
        """The number of parts that its output is made in, each with all its steps."""
        return self.record.spec.segments

    @property
    def total_steps(self) -> int:
        return self.request.steps * self.segments

    @property
    def cancel_requested(self) -> bool:
        return self.record.cancel_reason is not None

    # --- its log ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[Entry]:
        """What has been shown."""
        return self._entries

    @property
    def last_seq(self) -> int:
        """The seq of the newest event that has been shown."""
        return self._entries[-1].seq if self._entries else 0

    @property
    def appended_seq(self) -> int:
        """No event with a greater seq was ever appended."""
        return self._appended

    def after(self, seq: int) -> Sequence[Entry]:
        """The entries that have been shown with a greater seq."""
        return self._entries[bisect.bisect_right(self._entries, seq, key=lambda entry: entry.seq) :]

    def append(self, event: Event) -> Entry:
        """Adds an event. A job that has ended takes no more."""
        if self.ended:
            raise FailedPrecondition(f"job {self.id} has ended, it cannot take {type(event).__name__}")
        self._appended += 1
        entry = Entry(self._appended, self.clock(), event)
        self.ended = isinstance(event, TERMINAL)
        self.journal(self, entry)
        return entry

    def show(self, entry: Entry) -> None:
        """Advances the state by an event and wakes all waiters."""
        self._entries.append(entry)
        self._appended = max(self._appended, entry.seq)
        if not isinstance(entry.event, PROGRESS):
            self.kept_seq = entry.seq
        self.record = advanced(self.record, entry)
        self._follow(entry)
        self._notify()
        if self.state.terminal:
            self.on_end(self)

    def catch_up(self, stored: StoredJob) -> None:
        """Shows what the store has of a job that another server runs, or has run until now. What was read before
        something newer was shown changes nothing.
        """
        if stored.entries and stored.entries[-1].seq < self.kept_seq:
            return
        for entry in stored.entries:
            if entry.seq > self.kept_seq:
                self.show(entry)
        self.record = stored.record
        # what was seen after its last kept event, if it has not ended, had a seq up to this one
        self._appended = max(self.last_seq, 0 if self.state.terminal else stored.record.reserved_seq)
        self.ended = self.state.terminal

    def release(self) -> None:
        """Nothing more is appended here."""
        self.released = True
        self._notify()

    def vanish(self) -> None:
        """It is not anywhere any more."""
        self.gone = True
        self._notify()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _follow(self, entry: Entry) -> None:
        match entry.event:
            case Started():
                self.starts.append(entry.time)
            case Preempted():
                self.eta = None
            case Retrying():
                self.step, self.eta = 0, None
            case StepProgress() as event:
                self.step, self.eta = event.step, event.eta
            case ArtifactReady() as event:
                self.outputs[event.artifact] = entry.time
            case Completed() as event:
                self.artifacts, self.effective = event.artifacts, event.effective
                self.warnings, self.stats = event.warnings, event.stats
            case Failed() as event:
                self.failure, self.stats = event.failure, event.stats
            case Cancelled() as event:
                self.stats = event.stats
        if self.state.terminal:
            self.eta = None
            self.step = max(self.step, self.stats.steps_run if self.stats is not None else 0)

    async def wait(self, after_seq: int, timeout: float | None = None) -> bool:
        """True as soon as an entry with seq > `after_seq` exists, or it is released or gone; False when `timeout`
        seconds pass first.
        """
        while self.last_seq <= after_seq and not self.released and not self.gone:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, timeout)
            except TimeoutError:
                return self.last_seq > after_seq
            finally:
                self._waiters.discard(waiter)
        return True
