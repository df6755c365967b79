"""Carries out plans: one lane, that is one thread, for each of the three phases."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from omni_grpc.config import EngineConfig
from omni_grpc.resolve.settings import Placement, place
from omni_grpc.types.plan import (
    Broken,
    Died,
    EndRecording,
    LoadAdapter,
    Order,
    Plan,
    Ready,
    Record,
    RecordingEnd,
    Report,
    Sleep,
    SleepLevel,
    Slept,
    Stepped,
    UnloadAdapter,
    Unmoved,
    Wake,
    Woken,
)
from omni_grpc.types.request import Request
from omni_grpc.types.shared_inputs import read_inputs
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.vitals import Vitals
from omni_grpc.worker.adapting import Adapting
from omni_grpc.worker.build import build, machine
from omni_grpc.worker.failure import advised, device_lost, failure
from omni_grpc.worker.membership import Membership
from omni_grpc.worker.recording import Recordings
from omni_grpc.worker.vitals import vitals_of

logger = logging.getLogger(__name__)

Send = Callable[[Report], None]


class Worker:
    """Loads the model on the step lane, reports Loading and Ready, then answers each piece of a plan with one report.

    `prefix` begins the name of every shared-memory block it makes, so that its executor can free them after its death;
    with NO_BLOCKS it makes none.

    One that is a rank of several does everything in one lane, in the order in which it was told, since that is the same
    for all ranks: what is dropped, too, and decodes where ranks share them. Ranks that have no part in a decode do not
    answer it. A step that raises is the end of the worker: the others may be in the middle of it.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, send: Send, prefix: str) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._send_report = send
        self._prefix = prefix
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._membership = Membership.of(config)
        rank = 0 if self._membership is None else self._membership.rank
        self._recordings = Recordings(rank, prefix, send)
        self._adapting = Adapting(rank, self._send, lambda work: self._enter(self._step, work))
        self._device: torch.device | None = None
        self._counts: Mapping[str, int] = {}
        self._dropped = False
        """Whether its weights were dropped: waking loads them anew."""
        self._prepare, self._step, self._decode = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"omni_grpc-{lane}")
            for lane in ("prepare", "step", "decode")
        )
        if self._membership is not None:
            self._prepare = self._step
            if self._membership.shares_decodes:
                self._decode = self._step

    def start(self) -> None:
        """Begins to load. The report is Ready, or Died with the reason."""
        self._enter(self._step, self._load)

    def order(self, order: Order) -> None:
        """Moves the model, while the worker has no request; or begins or ends a recording, on the step lane. Adapters
        are loaded beside all lanes.
        """
        match order:
            case Sleep():
                self._enter(self._step, self._sleep, order.level)
            case Wake():
                self._enter(self._step, self._wake)
            case Record():
                self._enter(self._step, self._recordings.begin, order)
            case EndRecording():
                self._enter(self._step, self._recordings.end, order.end, order.id)
            case LoadAdapter():
                self._adapting.load(order)
            case UnloadAdapter():
                self._enter(self._prepare, self._adapting.unload, order.uid)

    def submit(self, plan: Plan) -> None:
        """Passes each part of the plan to its lane. The memory of a dropped request is freed once its lane is done with
        it.
        """
        with self._lock:
            self._wanted.update(request.id for request in plan.admit)
        if plan.drop and self._membership is None:
            self._drop(plan.drop)
        elif plan.drop:
            self._enter(self._step, self._drop, plan.drop)
        for request in plan.admit:
            self._enter(self._prepare, self._run_prepare, request)
        if plan.step:
            self._enter(self._step, self._run_step, plan.step)
        if self._membership is not None and not self._membership.decodes:
            for request_id in plan.decode:
                self._enter(self._step, self._drop, (request_id,))
            return
        for request_id in plan.decode_parts:
            self._enter(self._decode, self._run_decode_part, request_id)
        for request_id in plan.decode:
            self._enter(self._decode, self._run_decode, request_id)

    def close(self) -> None:
        """Returns when running work has ended; work that waits in a lane is not started."""
        self._adapting.close()
        for lane in (self._prepare, self._step, self._decode):
            lane.shutdown(cancel_futures=True)

    def abandon(self) -> None:
        """Ends like `close` where the engine is gone: a rank of several ends at once, without what runs."""
        if self._membership is not None:
            self._membership.leave()
        self.close()

    def _send(self, report: Report) -> None:
        # what looks like the failure of one request may be the end of the device, for this and all that follow
        failed = isinstance(report, Broken) or (isinstance(report, Stepped) and report.broken)
        if failed and (lost := device_lost()) is not None:
            report = Died(failure=lost)
        self._send_report(advised(report, self._config, self._checkpoint, self._placement))

    def _placement(self) -> Placement:
        return place(self._config.model, machine(), replicas=self._config.processes)

    def _enter(self, lane: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        lane.submit(work, *arguments).add_done_callback(self._check)

    def _check(self, future: Future[None]) -> None:
        """A lane that raises has sent no report, so the engine would wait for ever: report that the worker died
        instead.
        """
        if future.cancelled() or (error := future.exception()) is None:
            return
        try:
            self._send(Died(failure=device_lost() or failure(error, "reporting")))
        except OSError:
            logger.info("the engine is gone, a report was not delivered")

    def _load(self) -> None:
        try:
            ready = self._build()
        except Exception as error:  # noqa: BLE001 - whatever keeps the model from loading is reported, not raised in a lane
            self._send(Died(failure=failure(error, f"loading {self._checkpoint.path}")))
        else:
            self._send(ready)

    def _build(self) -> Ready:
        self._runner, self._residency, ready = build(
            self._config, self._checkpoint, self._prefix, self._send, membership=self._membership
        )
        self._checkpoint = ready.checkpoint or self._checkpoint
        self._device, self._counts = self._residency.device, self._residency.counts
        return self._adapting.begin(self._residency.adapters, ready)

    def vitals(self) -> Vitals:
        """How this process is, from any thread."""
        return dataclasses.replace(vitals_of(self._device, self._counts), adapters=self._adapting.memory)

    def _sleep(self, level: SleepLevel) -> None:
        began = time.monotonic()
        self._recordings.end(RecordingEnd.ASLEEP)
        try:
            freed = self._put_to_sleep(level)
        except Exception as error:  # noqa: BLE001 - an order that fails is answered, as a request is
            self._send(Unmoved(failure=failure(error, "putting the model to sleep")))
            return
        self._send(Slept(freed_bytes=freed, elapsed=time.monotonic() - began))

    def _put_to_sleep(self, level: SleepLevel) -> int:
        """Bytes that were freed. What has been dropped has nothing to keep."""
        if self._dropped:
            return 0
        residency = self._residency
        if level is SleepLevel.KEEP_WEIGHTS:
            return residency.sleep()
        self._adapting.drop()
        residency.begin_drop()
        del self._runner, self._residency
        self._dropped = True
        return residency.end_drop()

    def _wake(self) -> None:
        began, ready = time.monotonic(), None
        try:
            if self._dropped:
                ready = self._build()
                self._dropped = False
            else:
                self._residency.wake()
                self._adapting.wake()
        except Exception as error:  # noqa: BLE001 - an order that fails is answered, as a request is
            self._send(Unmoved(failure=failure(error, "waking the model")))
            return
        self._send(Woken(elapsed=time.monotonic() - began, ready=ready))

    def _drop(self, ids: tuple[str, ...]) -> None:
        with self._lock:
            # one that is being prepared is released after that
            prepared = [request_id for request_id in ids if request_id not in self._wanted]
            self._wanted.difference_update(ids)
        self._runner.drop(ids)
        if self._membership is None:
            self._release_later(prepared)
        else:
            self._adapting.release(prepared)

    def _release_later(self, ids: Sequence[str]) -> None:
        """Requests need their adapters no more, once the step has ended that they may be in."""
        if ids:
            self._adapting.expect(ids)
            self._enter(self._step, self._adapting.release_expected, ids)

    def _run_prepare(self, request: Request) -> None:
        try:
            request = dataclasses.replace(request, inputs=read_inputs(request.inputs))
            self._adapting.admit(request)
            prepared = self._runner.prepare(request)
        except Exception as error:  # noqa: BLE001 - one request's failure is that request's report
            self._still_wanted(request.id)
            self._end(request.id)
            self._send(Broken(id=request.id, phase="prepare", failure=failure(error, f"preparing {request.id}")))
            return
        if not self._still_wanted(request.id):
            self._end(request.id)
        self._send(prepared)

    def _end(self, request_id: str) -> None:
        """Nothing is left to do for a request that is in no step."""
        self._runner.drop((request_id,))
        self._adapting.release((request_id,))

    def _still_wanted(self, request_id: str) -> bool:
        """Whether the request was not dropped during its prepare; from then on the runner knows it."""
        with self._lock:
            wanted = request_id in self._wanted
            self._wanted.discard(request_id)
        return wanted

    def _run_step(self, ids: tuple[str, ...]) -> None:
        try:
            with self._recordings.step(ids):
                report: Report = self._runner.step(ids)
        except Exception as error:
            if self._membership is None:
                raise
            report = Died(failure=failure(error, f"stepping {', '.join(ids)}"))
        if isinstance(report, Stepped):
            self._adapting.release([broken.id for broken in report.broken])
        self._send(report)

    def _run_decode_part(self, request_id: str) -> None:
        try:
            report: Report = self._runner.decode_part(request_id)
        except Exception as error:  # noqa: BLE001 - one request's failure is that request's report
            if self._membership is None:
                self._runner.drop((request_id,))
                self._release_later((request_id,))
            # of several ranks, all drop it when they are told to: some may step it before that
            report = Broken(id=request_id, phase="decode", failure=failure(error, f"decoding {request_id}"))
        self._send(report)

    def _run_decode(self, request_id: str) -> None:
        try:
            report: Report = self._runner.decode(request_id)
        except Exception as error:  # noqa: BLE001 - one request's failure is that request's report
            report = Broken(id=request_id, phase="decode", failure=failure(error, f"decoding {request_id}"))
        self._end(request_id)
        self._send(report)
