"""The jobs of a server: those that are here in full, and those that the store has."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Collection, Mapping

from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.job import Job
from omni_grpc.store.journal import Journal
from omni_grpc.store.records import Cause, JobQuery, JobRecord, JobState, StoredJob, fits, place
from omni_grpc.store.seam import Store
from omni_grpc.types.errors import Aborted, NotFound

FINISHED_HERE = 1024
"""Finished jobs that stay here in full, the newest. Older ones are read from the store, without their previews."""


class Jobs:
    """Jobs by id. `get`, `newest` and `earlier` see what is here: all that have not ended, and the newest that have.
    `find`, `page` and `find_earlier` see the store too.
    """

    def __init__(
        self, store: Store, journal: Journal, forgotten: Forgotten, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._journal = journal
        self._forgotten = forgotten
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._by_request_id: dict[tuple[str, str], Job] = {}
        """By tenant and request_id: no tenant learns of another's."""
        self._finished: dict[str, Job] = {}
        """In the order in which they ended."""
        self._elsewhere: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()
        """Jobs of other servers that somebody here looks at."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job: Job, *, kept: bool = False) -> None:
        """A job of this server. `kept`: the store has it already."""
        self._here(job)
        if kept:
            self._journal.adopt(job)
        else:
            self._journal.create(job)

    def _here(self, job: Job) -> None:
        job.released = False
        self._jobs[job.id] = job
        self._elsewhere.pop(job.id, None)
        if job.record.request_id:
            self._by_request_id[job.tenant, job.record.request_id] = job

    def drop(self, job: Job) -> None:
        """It is not here any more; the store has whatever it has."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
        self._finished.pop(job.id, None)
        key = (job.tenant, job.record.request_id)
        if self._by_request_id.get(key) is job:
            del self._by_request_id[key]

    def ended(self, job: Job) -> None:
        """A job of this server has ended. The oldest that nobody watches leave."""
        self._finished[job.id] = job
        for old in list(self._finished.values())[: max(0, len(self._finished) - FINISHED_HERE)]:
            if not old.watchers and old.state.terminal:
                self.drop(old)

    # --- what is here -------------------------------------------------------------------------------------------------

    def get(self, job_id: str, tenant: str | None = None) -> Job:
        """Raises NotFound (JOB_NOT_FOUND) for a job that is not here, or with `tenant`, one of another tenant: nothing
        tells that from an unknown one.
        """
        job = self._jobs.get(job_id)
        if job is None or tenant not in (None, job.tenant):
            raise self._forgotten.not_found(job_id, reason="JOB_NOT_FOUND", tenant=tenant)
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
        query = JobQuery(states=states, labels=labels or {}, tenant=tenant)
        return [job for job in reversed(self._jobs.values()) if self._is_shown(job) and fits(job.record, query)]

    def finished(self) -> list[Job]:
        """Finished jobs, in the order in which they ended."""
        ended = [job for job in self._jobs.values() if job.record.end_time is not None]
        return sorted(ended, key=lambda job: job.record.end_time or 0)

    def earlier(self, request_id: str, fingerprint: bytes, tenant: str = "") -> Job | None:
        """The job that this tenant made with this idempotency key. Raises Aborted (REQUEST_ID_REUSED) where it was
        made of another request.
        """
        job = self._by_request_id.get((tenant, request_id)) if request_id else None
        return None if job is None else same_request(job, fingerprint)

    # --- what the store has too ---------------------------------------------------------------------------------------

    async def find(self, job_id: str, tenant: str | None = None) -> Job:
        """Raises NotFound like `get`, for what there is not anywhere."""
        if (job := self._jobs.get(job_id)) is not None:
            if self._is_over(job.record) and not job.watchers:
                # it waits for the next sweep
                raise self._expired(job, tenant)
            return self.get(job_id, tenant)
        stored = [] if self._journal.withdrawn(job_id) else await self._store.jobs.read([job_id])
        if not stored or tenant not in (None, stored[0].record.tenant):
            await self._forgotten.look_up(job_id, self._store.files)
            return self.get(job_id, tenant)
        if self._is_over(stored[0].record):
            raise self._expired(Job(stored[0].record), tenant)
        return self.restore(stored[0])

    async def find_earlier(self, request_id: str, fingerprint: bytes, tenant: str = "") -> Job | None:
        """As `earlier`."""
        if not request_id or (tenant, request_id) in self._by_request_id:
            return self.earlier(request_id, fingerprint, tenant)
        job_id = await self._store.jobs.find(tenant, request_id)
        if job_id is None or self._journal.withdrawn(job_id):
            return None
        return same_request(await self.find(job_id, tenant), fingerprint)

    async def page(self, query: JobQuery) -> list[Job]:
        """The jobs that fit, newest first: of those that are here, as they have been shown."""
        found: list[Job] = []
        more = query
        while len(found) < query.limit:
            stored = await self._store.jobs.page(more)
            found += [self.restore(one) for one in stored if self._is_elsewhere(one.record)]
            if len(stored) < query.limit:
                break
            more = dataclasses.replace(query, after=place(stored[-1].record))
        found = [job for job in found if job.id not in self._jobs]
        found += [job for job in self._jobs.values() if self._is_shown(job) and fits(job.record, query)]
        return sorted(found, key=lambda job: place(job.record), reverse=True)[: query.limit]

    def restore(self, stored: StoredJob) -> Job:
        """A job as the store has it. Of one that has not ended and is not here there is a single object, which whoever
        watches it shares.
        """
        record = stored.record
        if (job := self._jobs.get(record.id)) is not None:
            # somebody else has brought it here while it was read
            return job
        if (job := self._elsewhere.get(record.id)) is not None:
            job.catch_up(stored)
            return job
        job = Job.restored(stored)
        if not job.ended:
            self._elsewhere[record.id] = job
        return job

    @property
    def elsewhere(self) -> list[Job]:
        """Jobs of other servers that somebody here looks at."""
        return list(self._elsewhere.values())

    def followed(self, job_id: str) -> Job | None:
        """One of them."""
        return self._elsewhere.get(job_id)

    def _is_shown(self, job: Job) -> bool:
        """Whether there is such a job for callers: it is committed, and has not expired."""
        return not self._journal.creating(job.id) and (bool(job.watchers) or not self._is_over(job.record))

    def _is_elsewhere(self, record: JobRecord) -> bool:
        return not (record.id in self._jobs or self._journal.withdrawn(record.id) or self._is_over(record))

    def _is_over(self, record: JobRecord) -> bool:
        return record.expire_time is not None and record.expire_time <= self._clock()

    def _expired(self, job: Job, tenant: str | None) -> NotFound:
        self._forgotten.add(job.id, Cause.EXPIRED, tenant=job.tenant)
        return self._forgotten.not_found(job.id, reason="JOB_NOT_FOUND", tenant=tenant)


def same_request(job: Job, fingerprint: bytes) -> Job:
    """The job, or Aborted (REQUEST_ID_REUSED) where it was made of another request."""
    if job.record.fingerprint != fingerprint:
        raise Aborted(
            f"options.request_id {job.record.request_id!r} belongs to a different request, of job {job.id}",
            reason="REQUEST_ID_REUSED",
            metadata={"job_id": job.id},
        )
    return job
