"""The engine: takes requests, drives the worker through plans and reports, and writes each job's events.

Everything happens on one asyncio loop. A tick is: a report comes in, its events are appended, the next plan goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine.admission import not_started, restart_pause, stopped_first
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.fairness import ShareOf
from omni_grpc.engine.items import Lane
from omni_grpc.engine.outputs import Outputs
from omni_grpc.engine.run import JobRun
from omni_grpc.engine.scheduler import Decision, lanes
from omni_grpc.engine.standing import Standing
from omni_grpc.engine.status import EngineState
from omni_grpc.engine.submission import Submission, claim_of, new_run
from omni_grpc.engine.timers import Timers
from omni_grpc.resolve.advice import advise_priority
from omni_grpc.resolve.frames import segments
from omni_grpc.resolve.request import resolve_request
from omni_grpc.store.job import Job, new_job_id
from omni_grpc.store.seam import at_once
from omni_grpc.store.storage import Storage
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure, OmniError, Unavailable
from omni_grpc.types.events import ArtifactReady, Cancelled, Completed, Failed, Queued
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.media import Inputs
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import (
    Broken,
    Decoded,
    DecodedPart,
    Died,
    Fetched,
    Prepared,
    Ready,
    Report,
    RequestStep,
    SharedBytes,
    Stepped,
    requests_of,
)
from omni_grpc.types.request import Request
from omni_grpc.types.results import Artifact
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

_WORKER, _DRAIN = "worker", "drain"
"""Owners of the timers that belong to no job."""


class Engine(Standing):
    """One model, one worker, many jobs. Observers are called on the loop: `on_state` at each change of state, `on_end`
    with each job that has ended.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, executor: Executor, storage: Storage | None = None
    ) -> None:
        super().__init__(config, checkpoint, storage)
        self.on_state: list[Callable[[EngineState], None]] = []
        self.on_end: list[Callable[[Job], None]] = []
        self._executor = executor
        self._owns_storage = storage is None
        self._runs: dict[str, JobRun] = {}
        self._timers = Timers(self._on_timer_error)
        self._outputs = Outputs(self.artifacts, immediate=self.storage.store.immediate)
        self._started: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._failures = 0

    async def start(self) -> None:
        """Returns when the worker is ready. Raises the error that kept it from loading."""
        self._started = asyncio.get_running_loop().create_future()
        if self._owns_storage:
            await self.storage.open()
        self._executor.start(self._on_report)
        await self._started

    async def close(self, drain_timeout: float = 0.0) -> None:
        """Refuses new jobs, gives running ones `drain_timeout` seconds to finish, fails the rest and stops the worker.
        What waits is not lost with a store that outlives the process: it is left there for the next server.

        Calling it again during the drain restarts the timeout, so that a second call can cut the first one short.
        """
        if self._closing is None:
            self._enter(EngineState.DRAINING)
            self._closing = asyncio.ensure_future(self._close())
            if self.storage.durable:
                self._leave(run for run in list(self._runs.values()) if self._scheduler.is_waiting(run.job.id))
        if not self._closing.done():
            self._timers.set(_DRAIN, "drain_timeout", drain_timeout, lambda *_: self._stop_all())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._idle.wait()
        self._timers.stop()
        if self._started is not None:
            await self._executor.close()
        await asyncio.to_thread(self.inputs.close)
        if self._owns_storage:
            await self.storage.close()
        self._enter(EngineState.STOPPED)

    def _enter(self, state: EngineState) -> None:
        if state is self.state:
            return
        logger.info("engine: %s -> %s", self.state, state)
        self.state = state
        for observer in self.on_state:
            with self._blamed((), "telling of a change of state"):
                observer(state)

    # --- what callers do --------------------------------------------------------------------------------------------

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
        None for one that was waiting.
        """
        self._take(JobRun(job), kept=True, lost=lost)
        with self.watching(job):
            # one that is tied to its watchers gets a new disconnect grace
            pass

    def _take(self, run: JobRun, *, kept: bool = False, lost: Failure | None = None) -> None:
        job = run.job
        self._scheduler.add(job.request, claim_of(job.record), job.tenant, segments=job.segments, room=kept)
        self.jobs.add(job, kept=kept)
        job.on_end = self._tell_end
        self._runs[job.id] = run
        self._idle.clear()
        if lost is not None:
            job.append(run.retrying(lost, 0.0))
        self._queued(run)
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

    def share_by(self, share_of: ShareOf) -> None:
        """From now on `share_of` says what each tenant may have. To be called again when it says something else, so
        that jobs that waited for that start at once.
        """
        self._scheduler.share_of = share_of
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

    # --- what the worker says ---------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        with self._blamed(requests_of(report), f"handling {type(report).__name__}"):
            self._handle(report)
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

    def _on_timer_error(self, owner: str, name: str, error: Exception) -> None:
        with self._blamed((owner,), f"the timer {name}"):
            raise error
        if (owner, name) == (_WORKER, "restart"):
            self._on_died(not_started(error))
        self._tick()

    def _handle(self, report: Report) -> None:
        match report:
            case Loading():
                self.loading = report
            case Fetched():
                self.checkpoint = report.checkpoint
            case Ready():
                self._on_ready(report)
            case Prepared():
                self._on_prepared(report)
            case Stepped():
                self._on_stepped(report)
            case DecodedPart():
                self._on_decoded_part(report)
            case Decoded():
                self._on_decoded(report)
            case Broken():
                self._free(Lane(report.phase))
                self._on_broken(report)
            case Died():
                self._on_died(report.failure, final=report.final)

    def _on_ready(self, report: Ready) -> None:
        self.ready, self.failure = report, None
        if report.checkpoint is not None:
            self.checkpoint = report.checkpoint
        self._scheduler.exclusive = self.checkpoint.spec.exclusive
        self._failures = 0
        self._scheduler.cost = report.cost
        if self.state is not EngineState.DRAINING:
            self._enter(EngineState.READY)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _on_prepared(self, report: Prepared) -> None:
        self._free(Lane.PREPARE)
        self._meter.prepare.add(report.elapsed)
        if (run := self._runs.get(report.id)) is not None:
            run.job.append(run.encoded(report))
            self._scheduler.prepared(report.id, report.rows)
            self.inputs.free(run.job.request.inputs)

    def _on_stepped(self, report: Stepped) -> None:
        self._free(Lane.STEP)
        self._meter.stepped(report.elapsed)
        for progress in report.progress:
            if (run := self._runs.get(progress.id)) is not None:
                with self._blamed((progress.id,), "handling a step"):
                    self._on_progress(run, progress, report.elapsed)
        for broken in report.broken:
            with self._blamed((broken.id,), "handling Broken"):
                self._on_broken(broken)

    def _on_progress(self, run: JobRun, progress: RequestStep, elapsed: float) -> None:
        run.take_step(progress, elapsed)
        self._scheduler.stepped(progress.id, progress.total - progress.step, progress.evals)
        if progress.part_ready:
            self._scheduler.part_ready(progress.id)
        if progress.finished:
            self._scheduler.denoised(progress.id)

    def _on_decoded_part(self, report: DecodedPart) -> None:
        self._free(Lane.DECODE)
        if (run := self._runs.get(report.id)) is not None:
            run.job.append(run.decoded_part(report))

    def _on_decoded(self, report: Decoded) -> None:
        self._free(Lane.DECODE)
        self._meter.decode.add(report.elapsed)
        # the blocks are taken even for a job that was cancelled meanwhile: whoever gets a handle frees its block
        blocks = self._outputs.take([media.data for media in report.media])
        if (run := self._runs.get(report.id)) is None or run.job.ended:
            shared.discard_all(blocks)
            return
        artifacts = [run.artifact(media) for media in report.media]
        completed = run.done(report, self.checkpoint.scheduler, self.facts.found)
        # the worker is done with it; nothing is stored before all that can fail is done
        self._scheduler.finish(run.job.id)
        storing = self._store(run, artifacts, blocks, completed)
        if self._outputs.immediate:
            at_once(storing)
        else:
            self._outputs.start(run.job.id, storing)

    async def _store(
        self, run: JobRun, artifacts: Sequence[Artifact], blocks: Sequence[SharedBytes], completed: Completed
    ) -> None:
        """Ends a job with its outputs, once they are stored. It may be cancelled, or run out of time, meanwhile."""
        with self._blamed((run.job.id,), "storing its outputs"):
            try:
                await self._outputs.keep(artifacts, blocks, tenant=run.job.tenant)
            except OmniError as error:
                self._fail(run, error.failure)
            else:
                for artifact in artifacts:
                    run.job.append(ArtifactReady(artifact=artifact))
                run.job.append(completed)
                self._end(run)

    def _on_broken(self, report: Broken) -> None:
        if (run := self._runs.get(report.id)) is not None:
            logger.error("job %s failed in %s: %s", report.id, report.phase, report.failure.message)
            self._scheduler.finish(report.id)
            run.job.append(Failed(failure=report.failure, stats=run.stats()))
            self._end(run)

    def _on_died(self, failure: Failure, *, final: bool = False) -> None:
        """Fails the jobs that the worker held, unless they lost nothing with it. Queued jobs wait for a new worker,
        which is started after a growing delay; if this one was `final`, they fail too.
        """
        logger.error("%s", failure.message)
        self.failure = failure
        self._timers.clear_all(_WORKER)
        pause = restart_pause(self.config.worker.restart_backoff, self._failures)
        lost, back = self._scheduler.reset()
        for job_id in lost:
            with self._blamed((job_id,), "failing it with its worker"):
                self._fail(self._runs[job_id], failure)
        for job_id in back:
            with self._blamed((job_id,), "putting it back in the queue"):
                run = self._runs[job_id]
                self._timers.clear(job_id, "run_timeout")
                run.job.append(run.retrying(failure, pause))
                self._queued(run)
        starting = self._started is not None and not self._started.done()
        if final or starting:
            self._enter(EngineState.FAILED)
            self._fail_all(failure)
            if self._started is not None and starting:
                self._started.set_exception(failure.error())
            return
        if self._closing is None:
            self._enter(EngineState.RESTARTING)
        elif not self._runs:
            # it stops, and nobody waits for a worker
            return
        self._failures += 1
        self._timers.set(_WORKER, "restart", pause, self._restart)

    def _restart(self, name: str, limit: str, seconds: float) -> None:
        self._restarts += 1
        self.loading = Loading()
        logger.warning("restarting the worker, attempt %d", self._failures)
        self._executor.start(self._on_report)

    # --- the tick ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        # a drain may lack its worker: what waits then is kept for the next one
        while self.state in (EngineState.READY, EngineState.DRAINING) and self.failure is None:
            decision = self._scheduler.plan()
            if not decision.plan:
                return
            if self._send(decision):
                self._announce(decision)
                return

    def _send(self, decision: Decision) -> bool:
        """Sends a plan; False if the worker is gone, which may be known here before its Died report arrives."""
        plan = decision.plan
        try:
            self._executor.submit(plan)
        except Unavailable as error:
            self.failure = error.failure
            self._scheduler.undo(decision)
            return False
        except Exception as error:
            if jobs := [request.id for request in plan.admit] or plan.running:
                self._scheduler.undo(decision)
            with self._blamed(jobs, "handing it to the worker"):
                raise error
            return False
        self._meter.planned(self._scheduler.predicted_ms(plan.step))
        for lane in lanes(plan):
            self._timers.set(_WORKER, lane, self.config.worker.phase_timeout, self._hung)
        return True

    def _announce(self, decision: Decision) -> None:
        policy, step = self.config.scheduler.policy, decision.plan.step
        for request in decision.plan.admit:
            with self._blamed((request.id,), "starting it"):
                run = self._runs[request.id]
                self._timers.clear(request.id, "queue_timeout")
                self._timers.set(request.id, "run_timeout", run.job.record.spec.run_timeout, self._expire)
                run.job.append(run.started())
        for job_id in decision.preempted:
            with self._blamed((job_id,), "preempting it"):
                self._runs[job_id].job.append(self._runs[job_id].preempted(policy, len(step)))
        for job_id in decision.resumed:
            with self._blamed((job_id,), "resuming it"):
                self._runs[job_id].job.append(self._runs[job_id].resumed())

    def _free(self, lane: Lane) -> None:
        self._timers.clear(_WORKER, lane)
        self._scheduler.free(lane)

    def _hung(self, name: str, lane: str, seconds: float) -> None:
        logger.error("the worker's %s lane has not reported for %g s, killing the worker", lane, seconds)
        if lane == Lane.PREPARE:
            self._scheduler.blame()
        self._executor.kill()

    def _queued(self, run: JobRun) -> None:
        job_id, spec = run.job.id, run.job.record.spec
        run.job.append(Queued(position=self._scheduler.position(job_id), queue_depth=self._scheduler.waiting))
        self._timers.set(job_id, "queue_timeout", spec.queue_timeout, self._expire)
        if spec.deadline is not None:
            self._timers.set(job_id, "deadline", max(0.0, spec.deadline - time.time()), self._expire)

    def _fail(self, run: JobRun, failure: Failure) -> None:
        self._drop(run)
        if not run.job.ended:
            run.job.append(Failed(failure=failure, stats=run.stats()))
        self._end(run)

    def _drop(self, run: JobRun) -> None:
        self._outputs.stop(run.job.id)
        if run.job.id in self._scheduler:
            self._scheduler.remove(run.job.id)

    def _leave(self, runs: Iterable[JobRun]) -> None:
        """Leaves jobs as they are in the store."""
        for run in runs:
            self._drop(run)
            self._part_with(run)
            run.job.release()

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

    def _tell_end(self, job: Job) -> None:
        for observer in self.on_end:
            with self._blamed((), "telling of the end of a job"):
                observer(job)
