"""The engine: takes requests, drives the worker through plans and reports, and writes each job's events.

Everything happens on one asyncio loop. A tick is: a report comes in, its events are appended, the next plan goes out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine.admission import not_started, restart_pause
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.holding import Holding
from omni_grpc.engine.items import Lane
from omni_grpc.engine.run import JobRun
from omni_grpc.engine.scheduler import Decision, lanes
from omni_grpc.engine.status import EngineState
from omni_grpc.store.seam import at_once
from omni_grpc.store.storage import Storage
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Failure, OmniError, Unavailable
from omni_grpc.types.events import ArtifactReady, Completed, Failed
from omni_grpc.types.load_progress import Loading
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
from omni_grpc.types.results import Artifact
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

_WORKER, _DRAIN = "worker", "drain"
"""Owners of the timers that belong to no job."""


class Engine(Holding):
    """One model, one worker, many jobs. `on_state` observers are called on the loop at each change of state."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, executor: Executor, storage: Storage | None = None
    ) -> None:
        super().__init__(config, checkpoint, storage)
        self.on_state: list[Callable[[EngineState], None]] = []
        self._executor = executor
        self._owns_storage = storage is None
        self._started: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._failures = 0

    async def start(self) -> None:
        """Returns when the worker is ready. Raises the error that kept it from loading."""
        self._started = asyncio.get_running_loop().create_future()
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
            self._leave_waiting()
        if not self._closing.done():
            self._timers.set(_DRAIN, "drain_timeout", drain_timeout, lambda *_: self._stop_all())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._idle.wait()
        self._timers.stop()
        if self._started is not None:
            await self._executor.close()
        await self._outputs.close()
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

    # --- what the worker says ---------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        with self._blamed(requests_of(report), f"handling {type(report).__name__}"):
            self._handle(report)
        self._tick()

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
            self._leave_waiting()
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
