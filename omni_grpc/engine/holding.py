"""The jobs that an engine has: taken, limited in time, stopped, ended and left. What the worker does with them is in
`engine.py`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine.adapters import in_use, unloaded
from omni_grpc.engine.admission import stopped_first
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.fairness import ShareOf
from omni_grpc.engine.inputs import InputStore
from omni_grpc.engine.outputs import Outputs
from omni_grpc.engine.replica import Replica
from omni_grpc.engine.run import JobRun
from omni_grpc.engine.scheduler import Scheduler
from omni_grpc.engine.standing import Standing
from omni_grpc.engine.status import EngineState
from omni_grpc.engine.submission import Submission, claim_of, new_run
from omni_grpc.engine.timers import Timers
from omni_grpc.resolve.advice import advise_priority
from omni_grpc.resolve.frames import segments
from omni_grpc.resolve.memory_fit import check_memory
from omni_grpc.resolve.request import resolve_request
from omni_grpc.store.job import Job, new_job_id
from omni_grpc.store.storage import Storage
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.events import Cancelled, Failed, Queued
from omni_grpc.types.media import Inputs
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Report
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)


class Holding(Standing, abc.ABC):
    """Jobs and their runs. Observers are called on the loop: those of `on_end` with each job that has ended, of
    `on_report` with what a worker says, before anything is done about it, of `on_stored` with a job and the seconds
    that storing its outputs took, of `on_restart` with a worker that is started again and the reason why.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        executors: Sequence[Executor],
        storage: Storage | None = None,
        inputs: InputStore | None = None,
    ) -> None:
        super().__init__(config, checkpoint, executors, storage, inputs)
        self.on_end: list[Callable[[Job], None]] = []
        self.on_report: list[Callable[[Replica, Report], None]] = []
        self.on_stored: list[Callable[[Job, float], None]] = []
        self.on_restart: list[Callable[[Replica, str], None]] = []
        self.on_work: Callable[[], None] = lambda: None
        """Called when a job has come to wait, or has left."""
        self._runs: dict[str, JobRun] = {}
        self._timers = Timers(self._on_timer_error)
        self._outputs = Outputs(self.artifacts, immediate=self.storage.store.immediate)
        self._idle = asyncio.Event()
        self._idle.set()

    @abc.abstractmethod
    def _tick(self) -> None:
        """Has the worker do what can be done now."""

    @abc.abstractmethod
    def _on_timer_error(self, owner: str, name: str, error: Exception) -> None:
        """A timer's call has raised."""

    def submit(self, submission: Submission, *, approve: Callable[[Request], None] | None = None) -> tuple[Job, bool]:
        """Accepts a request. Returns its job, and True if an earlier call with this `request_id` created that job.

        Raises every refusal: Unavailable while loading, draining or stopped, ResourceExhausted when the queue is full,
        Aborted for a request_id that was used with another body, and the errors of `resolve_request`. While a dead
        worker is being restarted, jobs wait in the queue. `approve` sees the complete request before there is a job of
        it, and may refuse it too.
        """
        if (earlier := self.check_submission(submission)) is not None:
            return earlier, True
        resolved = resolve_request(submission.draft, self.facts, id=new_job_id())
        check_memory(resolved.request, self._books.memory, self.checkpoint.limits)
        if approve is not None:
            approve(resolved.request)
        run = new_run(
            submission,
            resolved,
            self.config,
            warnings=self.ready_warnings
            + submission.warnings
            + resolved.warnings
            + advise_priority(submission.priority, self.config.scheduler.policy),
            segments=segments(resolved.request.num_frames, self.checkpoint.limits),
        )
        self._take(run)
        return run.job, False

    def resume(self, job: Job, *, lost: Failure | None) -> None:
        """Goes on with a job that the store has, from its beginning. `lost`: what it was lost with, if it had started;
        None for one that was waiting. Nothing where this server ends too: it is left as it is.
        """
        if not self.takes_over:
            return
        # the clock by which its creation was dated
        job.clock = self.storage.clock
        self._take(JobRun(job), kept=True, lost=lost)
        if not job.watchers and (grace := job.record.spec.disconnect_grace) is not None:
            # one that is tied to its watchers: they have lost it through no fault of theirs
            grace = max(grace, self.config.jobs.disconnect_grace)
            self._timers.set(job.id, "disconnect_grace", grace, self._abandon)

    @property
    def takes_over(self) -> bool:
        """Whether jobs of other servers can be gone on with here."""
        return self.state in (EngineState.STARTING, EngineState.READY, EngineState.RESTARTING, EngineState.ASLEEP)

    @property
    def busy(self) -> bool:
        """Whether it has jobs that wait or run."""
        return bool(self._runs)

    @property
    def waits(self) -> bool:
        """Whether a job waits in its queue."""
        return self._books.waiting > 0

    def _take(self, run: JobRun, *, kept: bool = False, lost: Failure | None = None) -> None:
        job = run.job
        if not kept:
            self._books.check_room()
        self._books.add(job.request, claim_of(job.record), job.tenant, segments=job.segments)
        self.jobs.add(job, kept=kept)
        job.on_end = self._tell_end
        self._runs[job.id] = run
        self._idle.clear()
        if lost is not None:
            job.append(run.retrying(lost, 0.0))
        self._queued(run)
        # one of another life of the server, or of another server
        self._check_adapters(run)
        self._tick()

    def let_go(self, job: Job) -> None:
        """Stops to work on a job, without an event: it is not this server's any more."""
        if (run := self._runs.get(job.id)) is not None:
            self._leave([run])
        self.jobs.drop(job)
        self._tick()

    def cancel(self, job_id: str, reason: str) -> Job:
        """Stops a job before its next step. Idempotent: a job that has ended is returned as it is. Raises NotFound."""
        job = self.jobs.get(job_id)
        if (run := self._runs.get(job_id)) is not None and not job.ended:
            self._drop(run)
            job.append(Cancelled(reason=reason, completed_steps=run.step, stats=run.stats()))
            self._end(run)
            self._tick()
        return job

    def fail_waiting(self, failure: Failure) -> None:
        """Fails all jobs that wait in the queue."""
        for run in [run for run in self._runs.values() if self._books.is_waiting(run.job.id)]:
            self._fail(run, failure)
        self._tick()

    def look(self) -> None:
        """To be called when something outside has changed that jobs may wait for."""
        self._tick()

    def using(self, uid: str) -> list[JobRun]:
        """The jobs that wait or run with an adapter."""
        return [run for run in self._runs.values() if any(lora.key == uid for lora in run.job.request.loras)]

    async def unused(self, lora_id: str, uid: str, *, wait: float | None, force: bool) -> int:
        """Keeps new requests from an adapter, and returns when no job uses it; the number of those that `force` failed.
        Raises FailedPrecondition (LORA_IN_USE) where jobs use it after `wait` seconds (None: that is not waited for),
        and it can be named again then.
        """
        if wait is None and not force and (users := self.using(uid)):
            raise in_use(lora_id, len(users))
        self.adapters.leave(uid, True)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait or 0.0):
                    while self.using(uid):
                        await self.adapters.change()
            users = self.using(uid)
            if users and not force:
                raise in_use(lora_id, len(users))
        except BaseException:
            self.adapters.leave(uid, False)
            raise
        for run in users:
            self._fail(run, unloaded(lora_id))
        self._tick()
        return len(users)

    def fail_without(self) -> None:
        """Fails the jobs that wait for an adapter which no worker will have."""
        for run in [run for run in self._runs.values() if self._books.is_waiting(run.job.id)]:
            self._check_adapters(run)

    def _check_adapters(self, run: JobRun) -> None:
        missing = self.adapters.missing(run.job.request.loras, self.ready)
        if missing:
            self._fail(run, unloaded(missing, self.adapters.book.of_id(missing)))

    def running_of(self, tenant: str) -> int:
        """The number of a tenant's jobs that have left the queue and are not finished."""
        return self._books.running_of(tenant)

    def elsewhere_of(self, elsewhere: Callable[[str], int]) -> None:
        """From now on `elsewhere` says how many jobs of a tenant run that count against its limit too."""
        self._books.elsewhere = elsewhere

    def share_by(self, share_of: ShareOf) -> None:
        """From now on `share_of` says what each tenant may have. To be called again when it says something else, so
        that jobs that waited for that start at once.
        """
        self._books.share_of = share_of
        self._tick()

    @contextlib.contextmanager
    def watching(self, job: Job) -> Iterator[None]:
        """Counts a watcher. When the last one leaves, a job that is tied to its watchers gets its disconnect grace."""
        job.watchers += 1
        self._timers.clear(job.id, "disconnect_grace")
        try:
            yield
        finally:
            job.watchers -= 1
            if not job.watchers and job.id in self._runs:
                self._timers.set(job.id, "disconnect_grace", job.record.spec.disconnect_grace, self._abandon)

    def _abandon(self, job_id: str, limit: str, seconds: float) -> None:
        self.cancel(job_id, f"no client watched the job for {seconds:g} s")

    def _expire(self, job_id: str, limit: str, seconds: float) -> None:
        run = self._runs[job_id]
        message = f"{limit} of {seconds:g} s expired after {run.step} of {run.job.total_steps} steps"
        self._fail(run, Failure(code=Code.DEADLINE_EXCEEDED, reason=limit.upper(), message=message))
        self._tick()

    @contextlib.contextmanager
    def _blamed(self, job_ids: Iterable[str], doing: str) -> Iterator[None]:
        """Whatever goes wrong inside is the failure of these jobs. The engine and the other jobs go on."""
        try:
            yield
        except Exception as error:
            logger.exception("unexpected error while %s of %s", doing, ", ".join(job_ids) or "no job")
            message = f"{type(error).__name__} while {doing}: {plain(error)}"
            for run in filter(None, map(self._runs.get, job_ids)):
                self._fail(run, Failure(code=Code.INTERNAL, reason="ENGINE_ERROR", message=message))

    def _queued(self, run: JobRun) -> None:
        job_id, spec = run.job.id, run.job.record.spec
        run.job.append(Queued(position=self._books.position(job_id), queue_depth=self._books.waiting))
        self._timers.set(job_id, "queue_timeout", spec.queue_timeout, self._expire)
        if spec.deadline is not None:
            self._timers.set(job_id, "deadline", max(0.0, spec.deadline - self.storage.clock()), self._expire)
        self._used()

    def _fail(self, run: JobRun, failure: Failure) -> None:
        self._drop(run)
        if not run.job.ended:
            run.job.append(Failed(failure=failure, stats=run.stats()))
        self._end(run)

    def _drop(self, run: JobRun) -> None:
        self._outputs.stop(run.job.id)
        if run.job.id in self._books.items:
            self._scheduler_of(run.job.id).remove(run.job.id)

    def _scheduler_of(self, job_id: str) -> Scheduler:
        """That of the replica that has a job; for one that waits, any."""
        found = (replica.scheduler for replica in self._replicas if replica.scheduler.has(job_id))
        return next(found, self._replicas[0].scheduler)

    def _leave(self, runs: Iterable[JobRun]) -> None:
        """Leaves jobs as they are in the store."""
        for run in runs:
            self._drop(run)
            self._part_with(run)
            run.job.release()

    def _leave_waiting(self) -> None:
        """What waits is not lost with a store that outlives the process."""
        if self.storage.durable:
            self._leave(run for run in list(self._runs.values()) if self._books.is_waiting(run.job.id))

    def _stop_all(self) -> None:
        """The server ends before its jobs: those that the next one starts over are left to it."""
        if self.storage.durable:
            self._leave(run for run in list(self._runs.values()) if run.job.record.spec.requeue)
        self._fail_all(stopped_first())

    def _fail_all(self, failure: Failure) -> None:
        for run in list(self._runs.values()):
            self._fail(run, failure)

    def _end(self, run: JobRun) -> None:
        self._part_with(run)
        self.storage.retention.keep(run.job)

    def _part_with(self, run: JobRun) -> None:
        self._runs.pop(run.job.id, None)
        # decoded media are large, and the record of a job does not show them
        self.inputs.free(run.job.request.inputs)
        run.job.request = dataclasses.replace(run.job.request, inputs=Inputs())
        self._timers.clear_all(run.job.id)
        if not self._runs:
            self._idle.set()
        self.adapters.notify()
        self._used()

    def _used(self) -> None:
        self.last_used = time.monotonic()
        self.on_work()

    def _tell_end(self, job: Job) -> None:
        for observer in self.on_end:
            with self._blamed((), "telling of the end of a job"):
                observer(job)

    def _tell_stored(self, job: Job, seconds: float) -> None:
        for observer in self.on_stored:
            with self._blamed((), "telling of stored outputs"):
                observer(job, seconds)

    def _begin_again(self, replica: Replica, cause: str) -> None:
        """Counts another start of a worker, and tells of it."""
        replica.restarts += 1
        for observer in self.on_restart:
            with self._blamed((), "telling of a restart"):
                observer(replica, cause)
