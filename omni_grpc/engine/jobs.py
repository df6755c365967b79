"""Jobs and their event logs. A job's log is gap-free: entry n has seq n, so `after_seq` is an index."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping, Sequence

from omni_grpc.engine.forgotten import Forgotten
from omni_grpc.store.records import Cause, Entry, JobState
from omni_grpc.types.errors import Aborted, FailedPrecondition, Failure
from omni_grpc.types.events import (
    TERMINAL,
    Cancelled,
    Completed,
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

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no letter that reads as a digit."""


def new_job_id() -> str:
    """Sorts by creation: 50 bits of milliseconds, then 80 random bits."""
    value = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "job_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -5, -5))


class Job:
    """The record of one request: its state follows from the events appended to its log.

    It belongs to one event loop. `segments` is the number of parts that its output is made in, each with all its steps.
    """

    def __init__(
        self,
        request: Request,
        *,
        segments: int = 1,
        warnings: tuple[RequestWarning, ...] = (),
        defaults_used: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        fingerprint: bytes = b"",
        client_job_id: str = "",
        disconnect_grace: float | None = None,
        retention: float = 600.0,
        priority: int = 0,
        tenant: str = "",
        subject: str = "",
    ) -> None:
        self.request = request
        self.warnings = warnings
        self.defaults_used = dict(defaults_used or {})
        self.labels = dict(labels or {})
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.client_job_id = client_job_id
        self.disconnect_grace = disconnect_grace
        """Seconds without a watcher after which the job is cancelled; None: it outlives its watchers."""
        self.retention = retention
        self.priority = priority
        self.tenant = tenant
        self.subject = subject
        """Who made it, within the tenant."""
        self.state = JobState.QUEUED
        self.create_time = time.time()
        self.start_time: float | None = None
        self.end_time: float | None = None
        self.expire_time: float | None = None
        self.step = 0
        self.segments = segments
        self.total_steps = request.steps * segments
        self.eta: float | None = None
        self.artifacts: tuple[Artifact, ...] = ()
        self.effective: Effective | None = None
        self.failure: Failure | None = None
        self.stats: Stats | None = None
        self.cancel_requested = False
        self.watchers = 0
        self.previews: tuple[PreviewImage, ...] = ()
        self.preview_seq = 0
        """The seq of the step event that the newest previews belong to. Older ones are not kept."""
        self._entries: list[Entry] = []
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    @property
    def last_seq(self) -> int:
        return len(self._entries)

    def append(self, event: Event) -> Entry:
        """Adds an event, advances the state and wakes all waiters. A finished job takes no more events."""
        if self.state.terminal:
            raise FailedPrecondition(f"job {self.id} has ended ({self.state}), it cannot take {type(event).__name__}")
        entry = Entry(len(self._entries) + 1, time.time(), event)
        self._entries.append(entry)
        self._follow(event, entry.time)
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return entry

    def _follow(self, event: Event, now: float) -> None:
        match event:
            case Started():
                self.state, self.start_time = JobState.RUNNING, now
            case Retrying():
                self.state, self.start_time = JobState.QUEUED, None
            case Preempted():
                self.state, self.eta = JobState.PREEMPTED, None
            case Resumed():
                self.state = JobState.RUNNING
            case StepProgress():
                self.step, self.eta = event.step, event.eta
            case Completed():
                self.state, self.artifacts, self.effective = JobState.SUCCEEDED, event.artifacts, event.effective
                self.warnings, self.stats = event.warnings, event.stats
            case Failed():
                self.state, self.failure, self.stats = JobState.FAILED, event.failure, event.stats
            case Cancelled():
                self.state, self.stats = JobState.CANCELLED, event.stats
        if isinstance(event, TERMINAL):
            self.end_time, self.eta = now, None

    async def wait(self, after_seq: int, timeout: float | None = None) -> bool:
        """True as soon as an entry with seq > `after_seq` exists; False when `timeout` seconds pass without one."""
        while self.last_seq <= after_seq:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, timeout)
            except TimeoutError:
                return self.last_seq > after_seq
            finally:
                self._waiters.discard(waiter)
        return True


class Jobs:
    """The jobs of one engine, in memory, in order of creation."""

    def __init__(self, forgotten: Forgotten | None = None) -> None:
        self._forgotten = Forgotten() if forgotten is None else forgotten
        self._jobs: dict[str, Job] = {}
        self._by_request_id: dict[tuple[str, str], Job] = {}
        """By tenant and request_id: no tenant learns of another's."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job: Job) -> None:
        self._jobs[job.id] = job
        if job.request_id:
            self._by_request_id[job.tenant, job.request_id] = job

    def get(self, job_id: str, tenant: str | None = None) -> Job:
        """Raises NotFound (JOB_NOT_FOUND) for an unknown id, one that is no longer kept, or with `tenant`, one of
        another tenant: nothing tells that from an unknown one.
        """
        job = self._jobs.get(job_id)
        if job is None or tenant not in (None, job.tenant):
            raise self._forgotten.not_found(job_id, reason="JOB_NOT_FOUND", tenant=tenant)
        return job

    def earlier(self, request_id: str, fingerprint: bytes, tenant: str = "") -> Job | None:
        """The job that this tenant made with this idempotency key. Raises Aborted (REQUEST_ID_REUSED) where it was
        made of another request.
        """
        job = self._by_request_id.get((tenant, request_id)) if request_id else None
        if job is not None and job.fingerprint != fingerprint:
            raise Aborted(
                f"options.request_id {request_id!r} belongs to a different request, of job {job.id}",
                reason="REQUEST_ID_REUSED",
                metadata={"job_id": job.id},
            )
        return job

    def newest(
        self,
        *,
        states: Collection[JobState] = (),
        labels: Mapping[str, str] | None = None,
        tenant: str | None = None,
    ) -> list[Job]:
        """Newest first; with `states`, only jobs in one of them; with `labels`, only jobs that carry all of them; with
        `tenant`, only jobs of this one.
        """
        wanted = (labels or {}).items()
        return [
            job
            for job in reversed(self._jobs.values())
            if (tenant is None or job.tenant == tenant)
            and (not states or job.state in states)
            and wanted <= job.labels.items()
        ]

    def finished(self) -> list[Job]:
        """Finished jobs, in the order in which they ended."""
        return sorted(
            (job for job in self._jobs.values() if job.end_time is not None), key=lambda job: job.end_time or 0
        )

    def remove(self, job: Job, cause: Cause = Cause.EXPIRED) -> None:
        del self._jobs[job.id]
        self._forgotten.add(job.id, cause, tenant=job.tenant)
        key = (job.tenant, job.request_id)
        if self._by_request_id.get(key) is job:
            del self._by_request_id[key]
