"""The engine: takes requests, drives the worker through plans and reports, and writes each job's events.

Everything happens on one asyncio loop. A tick is: a report comes in, its events are appended, the next plan goes out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine.adapters import TIMER
from omni_grpc.engine.admission import not_started, restart_pause, stopped_first
from omni_grpc.engine.decision import Decision, lanes
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.inputs import InputStore
from omni_grpc.engine.items import Lane
from omni_grpc.engine.replica import Replica, ReplicaState
from omni_grpc.engine.resting import Resting
from omni_grpc.engine.run import JobRun
from omni_grpc.engine.status import EngineState
from omni_grpc.store.seam import at_once
from omni_grpc.store.storage import Storage
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Failure, OmniError, Unavailable
from omni_grpc.types.events import ArtifactReady, Completed, Failed
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Broken,
    Decoded,
    DecodedPart,
    Died,
    Fetched,
    Prepared,
    Ready,
    Recorded,
    Report,
    RequestStep,
    SharedBytes,
    Slept,
    Stepped,
    Unmoved,
    Woken,
    requests_of,
)
from omni_grpc.types.results import Artifact
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

_DRAIN = "drain"
"""Owner of a timer that belongs to no job and to no replica."""


class Engine(Resting):
    """One model, one or more workers (replicas), many jobs. `on_state` observers are called on the loop at each change
    of state.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        executor: Executor,
        storage: Storage | None = None,
        *,
        more: Sequence[Executor] = (),
        inputs: InputStore | None = None,
    ) -> None:
        """`executor` runs the first replica, `more` the others. `storage` and `inputs` are those of the server, where
        it has other engines.
        """
        super().__init__(config, checkpoint, (executor, *more), storage, inputs)
        self.on_state: list[Callable[[EngineState], None]] = []
        self._owns_storage, self._owns_inputs = storage is None, inputs is None
        self.adapters.begin = self._begin
        self._started: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Returns when a worker is ready. Raises the error that kept the first one that ended from loading."""
        self._started = asyncio.get_running_loop().create_future()
        await self.storage.open()
        for replica in self._replicas:
            replica.start(self._on_report)
        # meanwhile, what servers left that were killed with all their processes
        await asyncio.gather(self._started, asyncio.to_thread(shared.sweep_dead))

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
            await asyncio.gather(*(replica.executor.close() for replica in self._replicas))
        for replica in self._replicas:
            replica.give_up(stopped_first())
            self.profiling.lost(replica, stopped_first())
            self.adapters.lost(replica)
        await self._outputs.close()
        if self._owns_inputs:
            await asyncio.to_thread(self.inputs.close)
        if self._owns_storage:
            await self.storage.close()
        self._enter(EngineState.STOPPED)

    @property
    def ending(self) -> bool:
        return self._closing is not None

    def _enter(self, state: EngineState) -> None:
        if state is self.state:
            return
        logger.info("engine: %s -> %s", self.state, state)
        self.state = state
        for observer in self.on_state:
            with self._blamed((), "telling of a change of state"):
                observer(state)

    def _follow_replicas(self) -> None:
        """The engine is ready as long as one replica is."""
        if self._closing is not None:
            return
        states = {replica.state for replica in self._replicas}
        if ReplicaState.READY in states or ReplicaState.DRAINING in states:
            self._enter(EngineState.READY)
        elif self.asleep:
            self._enter(EngineState.ASLEEP)
        elif states == {ReplicaState.FAILED}:
            self._enter(EngineState.FAILED)
        elif self.ready is not None:
            self._enter(EngineState.RESTARTING)

    # --- what the workers say -----------------------------------------------------------------------------------------

    def _on_report(self, replica: Replica, report: Report) -> None:
        for observer in self.on_report:
            with self._blamed((), f"telling of {type(report).__name__}"):
                observer(replica, report)
        with self._blamed(requests_of(report), f"handling {type(report).__name__}"):
            self._handle(replica, report)
        self._tick()

    def _on_timer_error(self, owner: str, name: str, error: Exception) -> None:
        with self._blamed((owner,), f"the timer {name}"):
            raise error
        for replica in self._replicas:
            if (owner, name) == (replica.owner, "restart"):
                self._on_died(replica, not_started(error))
        self._tick()

    def _handle(self, replica: Replica, report: Report) -> None:
        match report:
            case Loading():
                replica.on_loading(report, self.checkpoint.name)
            case Fetched():
                self.checkpoint = report.checkpoint
            case Ready():
                self._on_ready(replica, report)
            case Prepared():
                self._on_prepared(replica, report)
            case Stepped():
                self._on_stepped(replica, report)
            case DecodedPart():
                self._on_decoded_part(replica, report)
            case Decoded():
                self._on_decoded(replica, report)
            case Broken():
                self._free(replica, Lane(report.phase))
                self._on_broken(replica, report)
            case Died():
                self._on_died(replica, report.failure, final=report.final)
            case Slept() | Woken() | Unmoved():
                replica.on_moved(report)
            case Recorded():
                self.profiling.on_recorded(replica, report)
            case AdapterLoaded() | AdapterFailed() | AdapterUnloaded():
                self.adapters.on_report(replica, report)

    def _on_ready(self, replica: Replica, report: Ready) -> None:
        if report.checkpoint is not None:
            self.checkpoint = report.checkpoint
        if not self.adapters.awaits(replica, report, self._timers):
            self._begin(replica, report)

    def _begin(self, replica: Replica, report: Ready) -> None:
        """A worker has its model and all adapters, and takes jobs from now on."""
        self._timers.clear(replica.owner, TIMER)
        replica.on_ready(report, exclusive=self.checkpoint.spec.exclusive)
        # of another life of the server, or unloaded while there was no worker
        self.fail_without()
        self._follow_replicas()
        if self._started is not None and not self._started.done():
            self._started.set_result(None)
        self._tick()

    def _on_prepared(self, replica: Replica, report: Prepared) -> None:
        self._free(replica, Lane.PREPARE)
        replica.meter.prepare.add(report.elapsed)
        if (run := self._runs.get(report.id)) is not None:
            run.job.append(run.encoded(report))
            replica.scheduler.prepared(report.id, report.rows)
            self.inputs.free(run.job.request.inputs)
            if (failure := replica.scheduler.too_large(report.id)) is not None:
                self._fail(run, failure)

    def _on_stepped(self, replica: Replica, report: Stepped) -> None:
        self._free(replica, Lane.STEP)
        replica.meter.stepped(
            report.elapsed,
            jobs=len(report.progress) + len(report.broken),
            rows=sum(progress.rows for progress in report.progress),
        )
        for progress in report.progress:
            if (run := self._runs.get(progress.id)) is not None:
                with self._blamed((progress.id,), "handling a step"):
                    self._on_progress(replica, run, progress, report.elapsed)
        for broken in report.broken:
            with self._blamed((broken.id,), "handling Broken"):
                self._on_broken(replica, broken)

    def _on_progress(self, replica: Replica, run: JobRun, progress: RequestStep, elapsed: float) -> None:
        run.take_step(progress, elapsed)
        replica.scheduler.stepped(progress.id, progress.total - progress.step, progress.evals)
        if progress.part_ready:
            replica.scheduler.part_ready(progress.id)
        if progress.finished:
            replica.scheduler.denoised(progress.id)

    def _on_decoded_part(self, replica: Replica, report: DecodedPart) -> None:
        self._free(replica, Lane.DECODE)
        if (run := self._runs.get(report.id)) is not None:
            run.job.append(run.decoded_part(report))

    def _on_decoded(self, replica: Replica, report: Decoded) -> None:
        self._free(replica, Lane.DECODE)
        replica.meter.decode.add(report.elapsed)
        # the blocks are taken even for a job that was cancelled meanwhile: whoever gets a handle frees its block
        blocks = self._outputs.take([media.data for media in report.media])
        if (run := self._runs.get(report.id)) is None or run.job.ended:
            shared.discard_all(blocks)
            return
        artifacts = [run.artifact(media) for media in report.media]
        found = self.facts.found if self.ready is None else self.adapters.book.told(self.ready.found)
        completed = run.done(report, self.checkpoint.scheduler, found)
        # the worker is done with it; nothing is stored before all that can fail is done
        replica.scheduler.finish(run.job.id)
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
            run.job.handed, began = self.storage.clock(), time.monotonic()
            try:
                await self._outputs.keep(artifacts, blocks, tenant=run.job.tenant)
            except OmniError as error:
                self._fail(run, error.failure)
            else:
                self._tell_stored(run.job, time.monotonic() - began)
                for artifact in artifacts:
                    run.job.append(ArtifactReady(artifact=artifact))
                run.job.append(completed)
                self._end(run)

    def _on_broken(self, replica: Replica, report: Broken) -> None:
        if (run := self._runs.get(report.id)) is not None:
            logger.error("job %s failed in %s: %s", report.id, report.phase, report.failure.message)
            replica.scheduler.finish(report.id)
            run.job.append(Failed(failure=report.failure, stats=run.stats()))
            self._end(run)

    def _on_died(self, replica: Replica, failure: Failure, *, final: bool = False) -> None:
        """Fails the jobs that a worker held, unless they lost nothing with it. Queued jobs wait for a new worker, which
        is started after a growing delay, or go to another replica; if this was the last one, and `final`, they fail.
        """
        logger.error("%s", failure.message)
        replica.failure = failure
        self._timers.clear_all(replica.owner)
        self.profiling.lost(replica, failure)
        self.adapters.lost(replica)
        pause = restart_pause(self.config.worker.restart_backoff, replica.failures)
        lost, back = replica.scheduler.reset()
        for job_id in lost:
            with self._blamed((job_id,), "failing it with its worker"):
                self._fail(self._runs[job_id], failure)
        for job_id in back:
            with self._blamed((job_id,), "putting it back in the queue"):
                run = self._runs[job_id]
                self._timers.clear(job_id, "run_timeout")
                run.job.append(run.retrying(failure, pause))
                self._queued(run)
                self._check_adapters(run)
        if replica.resting:
            replica.on_lost(failure)
            return
        starting = self._started is not None and not self._started.done()
        if final or starting:
            replica.state = ReplicaState.FAILED
            if starting or not any(one.state is not ReplicaState.FAILED for one in self._replicas):
                self._enter(EngineState.FAILED)
                self._leave_waiting()
                self._fail_all(failure)
            if self._started is not None and starting:
                self._started.set_exception(failure.error())
            return
        replica.state = ReplicaState.RESTARTING
        self._follow_replicas()
        if self._closing is not None and not self._runs:
            # it stops, and nobody waits for a worker
            return
        replica.failures += 1
        self._timers.set(replica.owner, "restart", pause, lambda *_: self._restart(replica))

    def _restart(self, replica: Replica) -> None:
        self._begin_again(replica, "" if replica.failure is None else replica.failure.reason)
        logger.warning("restarting worker %d, attempt %d", replica.number, replica.failures)
        replica.start(self._on_report)

    # --- the tick ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        # a drain may lack its worker: what waits then is kept for the next one
        if self.state in (EngineState.READY, EngineState.DRAINING):
            self._give_all()
        self._look_for_quiet()

    def _give_all(self) -> None:
        several = len(self._replicas) > 1
        # whoever has the least to do is the first to take from the queue
        for replica in sorted(self._replicas, key=lambda one: one.scheduler.work_ms) if several else self._replicas:
            self._give_work(replica)

    def _give_work(self, replica: Replica) -> None:
        while replica.open:
            decision = replica.scheduler.plan()
            if not decision.plan:
                return
            if self._send(replica, decision):
                self._announce(decision)
                return

    def _send(self, replica: Replica, decision: Decision) -> bool:
        """Sends a plan; False if the worker is gone, which may be known here before its Died report arrives."""
        plan = decision.plan
        try:
            replica.executor.submit(plan)
        except Unavailable as error:
            replica.failure = error.failure
            replica.scheduler.undo(decision)
            return False
        except Exception as error:
            if jobs := [request.id for request in plan.admit] or plan.running:
                replica.scheduler.undo(decision)
            with self._blamed(jobs, "handing it to the worker"):
                raise error
            return False
        replica.meter.planned(replica.scheduler.predicted_ms(plan.step), plan.step)
        for lane in lanes(plan):
            limit = self.config.worker.phase_timeout
            self._timers.set(replica.owner, lane, limit, lambda _, lane, seconds: self._hung(replica, lane, seconds))
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

    def _free(self, replica: Replica, lane: Lane) -> None:
        self._timers.clear(replica.owner, lane)
        replica.scheduler.free(lane)

    def _hung(self, replica: Replica, lane: str, seconds: float) -> None:
        logger.error("the worker's %s lane has not reported for %g s, killing the worker", lane, seconds)
        if lane == Lane.PREPARE:
            replica.scheduler.blame()
        replica.executor.kill()
