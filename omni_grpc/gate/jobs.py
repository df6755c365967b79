"""Jobs that outlive the call that made them: looked at, followed, stopped and deleted."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from omni_grpc.engine import Job, JobState
from omni_grpc.fleet import Fleet
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.follow import Told, Update, check_cursor, follow
from omni_grpc.gate.merge import Merged
from omni_grpc.gate.pages import MAX_SIZE, PageRequest
from omni_grpc.gate.refusals import Refusals, refused
from omni_grpc.gate.sharing import Sharing
from omni_grpc.gate.stored import Stored, available
from omni_grpc.identity.records import LONGEST_NAME, is_name
from omni_grpc.store.records import JobQuery, Position, place
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import OperationCancelled, Unavailable
from omni_grpc.types.events import Cancelled

T = TypeVar("T")

MAX_REASON_CHARS = 1024
OTHERS = 2.0
"""Seconds between two looks for new jobs of other servers."""
MOST_KNOWN = 10_000
"""Jobs that a watch remembers that it has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A watch of many jobs: those that are named, and all that carry `labels`, also the ones to come.

    `after_seq`: for each job that has been seen before, the last seq of it. `interval`: the shortest time in seconds
    between the progress events of a job.
    """

    job_ids: Sequence[str] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    after_seq: Mapping[str, int] = dataclasses.field(default_factory=dict)
    interval: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Generic[T]):
    """How a stack shows the jobs of a watch. Each is called at the moment that it shows, since jobs go on."""

    snapshot: Callable[[Job], T]
    update: Callable[[Job, Update], T]
    heartbeat: Callable[[], T]


class JobGate:
    """Every function raises PermissionDenied for a missing scope, and NotFound (JOB_NOT_FOUND) for a job that the
    caller has not.
    """

    def __init__(self, fleet: Fleet, changes: Changes, stored: Stored, audit: Audit, sharing: Sharing) -> None:
        self._fleet = fleet
        self._sharing = sharing
        self._audit = audit
        self._changes = changes
        self._stored = stored
        self._heartbeat = fleet.config.server.heartbeat_interval
        self.on_update: list[Told] = []
        """Observers of what followers get."""

    async def get(self, caller: Caller, job_id: str, *, action: str = "GetJob") -> Job:
        """A job. `action`: what for, in the audit log."""
        with self._audit.refusals(caller, action, job_id=job_id):
            caller.require(Scope.READ, Scope.GENERATE, Scope.ADMIN)
            return await self._stored.job(caller, job_id)

    async def queue_position(self, job: Job) -> int:
        """The number of jobs that go before this one, on any server of the store; 0 once it has left the queue."""
        with available():
            return await self._sharing.queue_position(job)

    def queue_position_here(self, job: Job) -> int:
        """The same among the jobs of this server."""
        return self._fleet.queue_position(job) if job.state is JobState.QUEUED else 0

    def replica(self, job: Job) -> str:
        """The server that has a job, or had it last, by its instance_id; "" where the store is not shared."""
        return job.record.server if self._fleet.storage.store.shared else ""

    async def page(
        self,
        caller: Caller,
        asked: PageRequest,
        *,
        states: Collection[JobState] | None = None,
        model: str = "",
        labels: Mapping[str, str] | None = None,
        created_from: float | None = None,
        created_before: float | None = None,
        tenant: str = "",
    ) -> tuple[Sequence[Job], str]:
        """A page of the caller's jobs, newest first, and the token of the next. `states`: None for all. The times are
        in Unix seconds. `tenant`: only its jobs, for those who see every tenant's.
        """
        with self._audit.refusals(caller, "ListJobs"):
            caller.require(Scope.READ, Scope.ADMIN)
            if tenant and caller.sees not in (None, tenant):
                raise refused("tenant", "is another one than the caller's; only the scope `admin` sees other tenants")
            if tenant and not is_name(tenant):
                raise refused("tenant", f"is no name of a tenant: expected 1 to {LONGEST_NAME} printable characters")
            if created_from is not None and created_before is not None and created_before <= created_from:
                raise refused("created_before", "is not later than created_from; swap them, or leave one out")
            if states is not None and not states:
                return [], ""
            query = JobQuery(
                tenant=tenant or caller.sees,
                states=states or (),
                labels=labels or {},
                model=model,
                created_from=created_from,
                created_before=created_before,
                after=asked.after,
                limit=asked.limit + 1,
            )
            return asked.cut(await self._stored.page(query), job_place)

    async def watch(
        self, caller: Caller, job_id: str, after_seq: int = 0, *, interval: float = 0.0
    ) -> AsyncGenerator[Update | None]:
        """The entries of a job with a greater seq until it has ended, None in every silence. `interval`: see `Pace`.

        Close it (aclosing) when the watcher leaves. Raises OutOfRange for a cursor that the job has not reached.
        """
        job = await self.get(caller, job_id, action="WatchJob")
        check_cursor(job, after_seq)
        self._sharing.watched(job)
        updates = follow(self._fleet, job, after_seq, interval=interval, heartbeat=self._heartbeat, told=self.on_update)
        async with aclosing(updates):
            async for update in updates:
                yield update

    async def watch_many(self, caller: Caller, watch: Watch, shown: Shown[T]) -> AsyncGenerator[T]:
        """The updates of many jobs as one stream, until all that are named have ended; with labels, until the server
        stops. A job without a cursor begins with its snapshot.
        """
        with self._audit.refusals(caller, "WatchJobs"):
            named = await self._named(caller, watch)
        async with Merged[T]() as merged:
            for job in named:
                merged.add(self._updates(job, watch, shown))
            if watch.labels:
                merged.add(self._select(caller, watch, Newcomers(named), shown, merged))
            while True:
                try:
                    update = await merged.next(self._heartbeat)
                except TimeoutError:
                    update = shown.heartbeat()
                if update is None:
                    return
                yield update

    async def cancel(self, caller: Caller, job_id: str, reason: str) -> Job:
        """Stops a job before its next step. Idempotent: a job that has ended is returned as it is."""
        with self._audit.action(caller, "CancelJob", job_id=job_id):
            caller.require(Scope.GENERATE, Scope.ADMIN)
            refusals = Refusals()
            refusals.text("reason", reason, MAX_REASON_CHARS)
            refusals.check()
            job = await self._stored.job(caller, job_id)
            reason = reason or "cancelled by the client"
            if job.id in self._fleet.jobs and not job.released:
                job = self._fleet.cancel(job.id, reason)
                with available():
                    # what the caller is told is committed
                    await self._fleet.storage.journal.settled(job.id)
            elif not job.state.terminal:
                with available():
                    await self._sharing.cancel(job, reason)
            return job

    async def delete(self, caller: Caller, job_id: str) -> None:
        """Forgets a finished job with its events and outputs. Raises FailedPrecondition while it runs."""
        with self._audit.action(caller, "DeleteJob", job_id=job_id):
            caller.require(Scope.GENERATE, Scope.ADMIN)
            job = await self._stored.job(caller, job_id)
            with available():
                await self._fleet.storage.delete(job)

    # --- parts of a watch -----------------------------------------------------------------------------------------

    async def _named(self, caller: Caller, watch: Watch) -> Sequence[Job]:
        """The jobs that a watch names. Raises every refusal of it."""
        caller.require(Scope.READ, Scope.ADMIN)
        if not watch.job_ids and not watch.labels:
            raise refused("job_ids, label_selector", "are both empty; set at least one of them")
        named = [await self._stored.job(caller, job_id) for job_id in dict.fromkeys(watch.job_ids)]
        for job_id, after_seq in watch.after_seq.items():
            check_cursor(await self._stored.job(caller, job_id), after_seq)
        known = {job.id for job in (*named, *await self._selected(caller, watch))}
        if strays := watch.after_seq.keys() - known:
            raise refused(
                "after_seq", f"names {', '.join(sorted(strays))}, which neither job_ids nor label_selector includes"
            )
        return named

    async def _selected(self, caller: Caller, watch: Watch) -> Sequence[Job]:
        """The newest of the jobs that have the labels of a watch, newest first."""
        if not watch.labels:
            return []
        return await self._stored.page(JobQuery(tenant=caller.sees, labels=watch.labels, limit=MAX_SIZE))

    async def _updates(self, job: Job, watch: Watch, shown: Shown[T]) -> AsyncGenerator[T]:
        """The updates of one job: from a cursor on, or from a snapshot."""
        self._sharing.watched(job)
        after_seq = watch.after_seq.get(job.id)
        if after_seq is None:
            # taken together, so that the events go on exactly where the snapshot ends
            after_seq, snapshot = job.last_seq, shown.snapshot(job)
            with self._fleet.watching(job):
                yield snapshot
        updates = follow(self._fleet, job, after_seq, interval=watch.interval, heartbeat=None, told=self.on_update)
        async with aclosing(updates):
            async for update in updates:
                if update is not None:
                    yield shown.update(job, update)

    async def _select(
        self, caller: Caller, watch: Watch, newcomers: Newcomers, shown: Shown[T], merged: Merged[T]
    ) -> AsyncGenerator[T]:
        """Adds every job that has the labels to the watch, as it comes. Ends only with the server."""
        here = False
        while not self._fleet.stopped:
            count = self._changes.count
            # new jobs of this server are here in full; for those of others only the store can be asked
            found = self._stored.jobs(caller, labels=watch.labels) if here else await self._selected(caller, watch)
            for job in newcomers.among(found):
                merged.add(self._updates(job, watch, shown))
            here = await self._changes.wait(count, OTHERS if self._fleet.storage.store.shared else None)
        raise Unavailable("the server was stopped; watch again", reason="SERVER_STOPPED")
        yield  # never reached: it makes this a stream, like those it stands beside


class Newcomers:
    """Tells new jobs from those that a watch has already."""

    def __init__(self, known: Iterable[Job]) -> None:
        self._known = dict.fromkeys(job.id for job in known)

    def __len__(self) -> int:
        return len(self._known)

    def among(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Those of these jobs (newest first) that were not there before, the oldest first."""
        found = [job for job in reversed(jobs) if job.id not in self._known]
        self._known |= dict.fromkeys(job.id for job in found)
        while len(self._known) > MOST_KNOWN:
            # ids begin with the time: what comes is newer
            del self._known[next(iter(self._known))]
        return found


def job_place(job: Job) -> Position:
    """Where a job stands in a list."""
    return place(job.record)


def raise_outcome(job: Job) -> None:
    """Raises the failure or cancellation that a finished job ended with, if any."""
    if job.failure is not None:
        raise job.failure.error()
    last = job.entries[-1].event
    if isinstance(last, Cancelled):
        raise OperationCancelled(
            f"job {job.id} was cancelled after {last.completed_steps} steps: {last.reason}",
            reason="JOB_CANCELLED",
            metadata={"job_id": job.id},
        )
