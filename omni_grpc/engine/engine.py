"""The engine: takes requests, drives the worker through plans and reports, and writes each job's events.

Everything happens on one asyncio loop. A tick is: a report comes in, its events are appended, the next plan goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from omni_grpc import shared
from omni_grpc.config import EngineConfig
from omni_grpc.engine.artifacts import Artifacts
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.jobs import Job, Jobs, new_job_id
from omni_grpc.engine.run import Run
from omni_grpc.engine.scheduler import Lane, Phase, Scheduler
from omni_grpc.errors import Aborted, Code, FailedPrecondition, Failure, OmniError, Unavailable
from omni_grpc.plan import Broken, Decoded, Died, Prepared, Ready, Report, Stepped
from omni_grpc.request import ArtifactReady, Cancelled, Decoding, Draft, Failed, Queued
from omni_grpc.resolve import Facts, resolve_request
from omni_grpc.spec import Checkpoint

logger = logging.getLogger(__name__)


class EngineState(enum.StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request and how its job is to be kept. `disconnect_grace` is in seconds; None takes the configured one."""

    draft: Draft
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    request_id: str = ""
    fingerprint: bytes = b""
    client_job_id: str = ""
    cancel_on_disconnect: bool = False
    disconnect_grace: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The load at this moment."""

    queued: int
    running: int
    max_queue: int
    jobs: int
    artifact_bytes: int
    steps_per_second: float


class Engine:
    """One model, one worker, many jobs. `on_state` observers are called on the loop at each change of state."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, executor: Executor) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.jobs = Jobs()
        self.artifacts = Artifacts()
        self.state = EngineState.STARTING
        self.ready: Ready | None = None
        self.on_state: list[Callable[[EngineState], None]] = []
        self._executor = executor
        self._scheduler = Scheduler(config.scheduler.max_queue, config.scheduler.max_num_seqs)
        self._runs: dict[str, Run] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}
        self._step_seconds = 0.0

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the worker is ready. Raises what kept it from loading."""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._executor.start(self._on_report)
        await self._started

    async def close(self, drain_timeout: float = 0.0) -> None:
        """Refuses new jobs, gives running ones `drain_timeout` seconds to end, fails the rest and stops the worker."""
        if self.state is EngineState.STOPPED:
            return
        self._enter(EngineState.DRAINING)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_timeout)
        failure = Failure(
            code=Code.UNAVAILABLE,
            reason="SERVER_STOPPED",
            message="the server was stopped before this job ended; submit it again",
        )
        for run in list(self._runs.values()):
            self._fail(run, failure)
        for grace in self._graces.values():
            grace.cancel()
        await self._executor.close()
        self._enter(EngineState.STOPPED)

    def _enter(self, state: EngineState) -> None:
        if state is self.state:
            return
        logger.info("engine: %s -> %s", self.state, state)
        self.state = state
        for observer in self.on_state:
            observer(state)

    # --- what callers ask -------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> tuple[Job, bool]:
        """Accepts a request. Returns its job, and True where `request_id` had made that job before.

        Raises every refusal: Unavailable while starting, draining or dead, ResourceExhausted when the queue is full,
        Aborted for a request_id that was used with another body, and what `resolve_request` raises.
        """
        if (earlier := self.jobs.find(submission.request_id)) is not None:
            if earlier.fingerprint != submission.fingerprint:
                raise Aborted(
                    f"options.request_id {submission.request_id!r} was used with another request, by job {earlier.id}",
                    reason="REQUEST_ID_REUSED",
                    metadata={"job_id": earlier.id},
                )
            return earlier, True
        if self.state is not EngineState.READY:
            raise Unavailable(
                f"this server takes no jobs: it is {self.state}", reason=f"ENGINE_{self.state}", retry_after=1.0
            )
        facts = Facts(self.checkpoint, self.config.limits)
        resolved = resolve_request(submission.draft, facts, id=new_job_id())
        self._scheduler.add(resolved.request)
        grace = (
            self.config.jobs.disconnect_grace if submission.disconnect_grace is None else submission.disconnect_grace
        )
        job = Job(
            resolved.request,
            warnings=resolved.warnings,
            defaults_used=resolved.defaults_used,
            labels=submission.labels,
            request_id=submission.request_id,
            fingerprint=submission.fingerprint,
            client_job_id=submission.client_job_id,
            disconnect_grace=grace if submission.cancel_on_disconnect else None,
        )
        self._forget_expired()
        self.jobs.add(job)
        self._runs[job.id] = Run(job)
        self._idle.clear()
        position = self._scheduler.position(job.id)
        job.append(Queued(position=position, depth=self._scheduler.waiting))
        self._tick()
        return job, False

    def cancel(self, job_id: str, reason: str) -> Job:
        """Stops a job before its next step. Idempotent: a job that has ended is returned as it is. Raises NotFound."""
        job = self.jobs.get(job_id)
        if (run := self._runs.get(job_id)) is not None:
            job.cancel_requested = True
            self._scheduler.remove(job_id)
            job.append(Cancelled(reason=reason, completed_steps=job.step, stats=run.stats()))
            self._end(run)
            self._tick()
        return job

    def delete(self, job_id: str) -> None:
        """Forgets a finished job with its events and artifacts. Raises NotFound, FailedPrecondition while it runs."""
        job = self.jobs.get(job_id)
        if not job.state.terminal:
            raise FailedPrecondition(f"job {job_id} is {job.state}; cancel it first", reason="JOB_NOT_FINISHED")
        self._forget(job)

    def queue_position(self, job: Job) -> int:
        """Jobs before this one in the queue; 0 once it has left it."""
        return self._scheduler.position(job.id)

    @contextlib.contextmanager
    def watching(self, job: Job) -> Iterator[None]:
        """Counts a watcher. When the last one leaves, a job that is tied to its watchers gets its disconnect grace."""
        job.watchers += 1
        if (timer := self._graces.pop(job.id, None)) is not None:
            timer.cancel()
        try:
            yield
        finally:
            job.watchers -= 1
            if not job.watchers and job.disconnect_grace is not None and not job.state.terminal:
                reason = f"no client for {job.disconnect_grace:g} s"
                self._graces[job.id] = self._loop.call_later(job.disconnect_grace, self._abandon, job.id, reason)

    def stats(self) -> EngineStats:
        return EngineStats(
            queued=self._scheduler.waiting,
            running=self._scheduler.active,
            max_queue=self.config.scheduler.max_queue,
            jobs=len(self.jobs),
            artifact_bytes=self.artifacts.size_bytes,
            steps_per_second=1 / self._step_seconds if self._step_seconds else 0.0,
        )

    def _abandon(self, job_id: str, reason: str) -> None:
        del self._graces[job_id]
        if job_id in self._runs:
            self.cancel(job_id, reason)

    # --- what the worker says ---------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        match report:
            case Ready():
                self._on_ready(report)
            case Prepared():
                self._on_prepared(report)
            case Stepped():
                self._on_stepped(report)
            case Decoded():
                self._on_decoded(report)
            case Broken():
                self._scheduler.free(Lane(report.phase))
                self._on_broken(report)
            case Died():
                self._on_died(report.failure)
        self._tick()

    def _on_ready(self, report: Ready) -> None:
        self.ready = report
        self._enter(EngineState.READY)
        self._started.set_result(None)

    def _on_prepared(self, report: Prepared) -> None:
        self._scheduler.free(Lane.PREPARE)
        if (run := self._runs.get(report.id)) is not None:
            run.job.append(run.encoded(report))
            self._scheduler.move(report.id, Phase.RUNNING)

    def _on_stepped(self, report: Stepped) -> None:
        self._scheduler.free(Lane.STEP)
        self._step_seconds = report.elapsed
        for progress in report.progress:
            if (run := self._runs.get(progress.id)) is None:
                continue
            run.job.append(run.stepped(progress, report.elapsed))
            if progress.finished:
                run.job.append(Decoding(done_units=0, total_units=run.job.request.num_outputs))
                self._scheduler.move(progress.id, Phase.DECODE_QUEUED)
        for broken in report.broken:
            self._on_broken(broken)

    def _on_decoded(self, report: Decoded) -> None:
        self._scheduler.free(Lane.DECODE)
        # the blocks are taken even for a job that was cancelled meanwhile: whoever gets a handle frees its block
        files = [(media, shared.take(media.data)) for media in report.media]
        if (run := self._runs.get(report.id)) is None:
            return
        for media, data in files:
            artifact = run.artifact(media)
            self.artifacts.put(artifact, data)
            run.job.append(ArtifactReady(artifact=artifact))
        run.job.append(run.done(report, self.checkpoint.scheduler))
        self._scheduler.finish(run.job.id)
        self._end(run)

    def _on_broken(self, report: Broken) -> None:
        if (run := self._runs.get(report.id)) is not None:
            logger.error("job %s failed in %s: %s", report.id, report.phase, report.failure.message)
            self._scheduler.finish(report.id)
            run.job.append(Failed(failure=report.failure, stats=run.stats()))
            self._end(run)

    def _on_died(self, failure: Failure) -> None:
        logger.error("%s", failure.message)
        self._scheduler.reset()
        for run in list(self._runs.values()):
            self._fail(run, failure)
        self._enter(EngineState.FAILED)
        if not self._started.done():
            self._started.set_exception(failure.error())

    # --- the tick ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.state not in (EngineState.READY, EngineState.DRAINING):
            return
        plan = self._scheduler.plan()
        for request in plan.admit:
            run = self._runs[request.id]
            run.job.append(run.started())
        if plan:
            self._executor.submit(plan)

    def _fail(self, run: Run, failure: Failure) -> None:
        if run.job.id in self._scheduler:
            self._scheduler.remove(run.job.id)
        run.job.append(Failed(failure=failure, stats=run.stats()))
        self._end(run)

    def _end(self, run: Run) -> None:
        del self._runs[run.job.id]
        run.job.expire_time = time.time() + self.config.jobs.retention
        if not self._runs:
            self._idle.set()
        self._forget_expired()

    def _forget_expired(self) -> None:
        now = time.time()
        for job in self.jobs.finished():
            too_much = self.artifacts.size_bytes > self.config.jobs.artifact_budget
            if not too_much and (job.expire_time is None or job.expire_time > now):
                continue
            if job.watchers:
                continue
            self._forget(job)

    def _forget(self, job: Job) -> None:
        for artifact in job.artifacts:
            with contextlib.suppress(OmniError):
                self.artifacts.delete(artifact.id)
        self.jobs.remove(job)
