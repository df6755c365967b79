"""One worker of a model, with the jobs that it has."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Mapping
from functools import partial

from omni_grpc.config import EngineConfig
from omni_grpc.engine.books import Books
from omni_grpc.engine.executor import Executor, Vital
from omni_grpc.engine.meter import Meter
from omni_grpc.engine.scheduler import Scheduler
from omni_grpc.engine.status import ReplicaStats
from omni_grpc.types.errors import Failure, OmniError
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Order, Ready, Report, Sleep, SleepLevel, Slept, Unmoved, Wake, Woken
from omni_grpc.types.vitals import Vitals

logger = logging.getLogger(__name__)


class ReplicaState(enum.StrEnum):
    """DRAINING: it ends what it has, and is then started anew. MOVING: it falls asleep, or wakes."""

    STARTING = "STARTING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    DRAINING = "DRAINING"
    MOVING = "MOVING"
    ASLEEP = "ASLEEP"
    FAILED = "FAILED"


class Replica:
    """`number` counts the replicas of a model from 0; `failure` says why there is no worker at the moment, `failures`
    how often in a row one could not be had.
    """

    def __init__(self, number: int, executor: Executor, books: Books, config: EngineConfig) -> None:
        self.number = number
        self.executor = executor
        self.scheduler = Scheduler(
            config.scheduler.max_queue,
            config.scheduler.max_num_seqs,
            max_step_ms=config.scheduler.max_step_ms,
            books=books,
        )
        self.meter = Meter()
        self.state = ReplicaState.STARTING
        self.loading = Loading()
        """Progress of loading, until the worker is ready."""
        self.ready: Ready | None = None
        self.failure: Failure | None = None
        self.failures = 0
        self.restarts = 0
        self.paused = False
        """Whether its model takes nothing from the queue at the moment."""
        self._moved: asyncio.Future[Slept | Woken | None] | None = None
        self._has_worker = True

    @property
    def owner(self) -> str:
        """The owner of its timers."""
        return f"worker {self.number}"

    @property
    def open(self) -> bool:
        """Whether it can be given work."""
        return self.state in (ReplicaState.READY, ReplicaState.DRAINING) and self.failure is None

    @property
    def resting(self) -> bool:
        """Whether it sleeps, or is about to, or is being woken."""
        return self.state in (ReplicaState.MOVING, ReplicaState.ASLEEP)

    def start(self, deliver: Callable[[Replica, Report], None]) -> None:
        """Starts its worker, whose reports are delivered with it."""
        self.loading = Loading()
        self.executor.start(partial(deliver, self))

    def on_loading(self, report: Loading, model: str) -> None:
        """How far it is; the log has each phase and component, and every tenth of their bytes."""
        before, self.loading = self.loading, report
        if _logged(before) != _logged(report):
            logger.info("model %s, worker %d: %s", model, self.number, report)

    def on_ready(self, report: Ready, *, exclusive: bool) -> None:
        self.ready, self.failure, self.failures = report, None, 0
        self.state = ReplicaState.READY
        self.scheduler.closed = self.paused
        self._has_worker = True
        self.scheduler.exclusive = exclusive
        self.scheduler.cost = report.cost
        self.scheduler.memory = report.memory
        self._settle(None)

    def pause(self, paused: bool) -> None:
        """Takes nothing from the queue, or takes again."""
        self.paused = paused
        self.scheduler.closed = paused or self.state is ReplicaState.DRAINING

    def drain(self) -> None:
        """From now on it ends what it has."""
        self.state = ReplicaState.DRAINING
        self.scheduler.closed = True

    async def sleep(self, level: SleepLevel) -> int:
        """Gives its device memory back, and returns the bytes. Raises what keeps it from that, and is awake then."""
        if self.state is not ReplicaState.READY:
            # a worker that is gone or still loads is not needed before it is woken
            self.state, self._has_worker = ReplicaState.ASLEEP, False
            await self.executor.close()
            return 0
        self.state = ReplicaState.MOVING
        moved = await self._ordered(Sleep(level=level), otherwise=ReplicaState.READY)
        self.state = ReplicaState.ASLEEP
        return moved.freed_bytes if isinstance(moved, Slept) else 0

    async def wake(self, deliver: Callable[[Replica, Report], None], *, exclusive: bool) -> None:
        """Takes the memory again. Raises what keeps it from that, and sleeps on then."""
        self.state = ReplicaState.MOVING
        if self._has_worker:
            moved = await self._ordered(Wake(), otherwise=ReplicaState.ASLEEP)
            if isinstance(moved, Woken) and moved.ready is not None:
                self.on_ready(moved.ready, exclusive=exclusive)
            self.state = ReplicaState.READY
        else:
            self._moved = asyncio.get_running_loop().create_future()
            self.start(deliver)
            await self._moved

    async def _ordered(self, order: Order, *, otherwise: ReplicaState) -> Slept | Woken | None:
        self._moved = asyncio.get_running_loop().create_future()
        try:
            self.executor.order(order)
            return await self._moved
        except OmniError:
            if self._has_worker:
                self.state = otherwise
            raise

    def on_moved(self, report: Slept | Woken | Unmoved) -> None:
        """An order was carried out, or could not be."""
        if isinstance(report, Unmoved):
            self._fail(report.failure)
        else:
            self._settle(report)

    def on_lost(self, failure: Failure) -> None:
        """Its worker is gone, while it slept or moved. Nobody waits for another one before it is woken."""
        self.state, self._has_worker = ReplicaState.ASLEEP, False
        self.failure = None
        self._fail(failure)

    def give_up(self, failure: Failure) -> None:
        """Its worker is closed: whoever waits for it to sleep or to wake is told."""
        self._fail(failure)

    def _settle(self, report: Slept | Woken | None) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(report)

    def _fail(self, failure: Failure) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_exception(failure.error())

    @property
    def vitals(self) -> Mapping[int, Vitals]:
        """How each process of its worker is, by its rank, as far as they say so."""
        return self.executor.all_vitals() if isinstance(self.executor, Vital) else {}

    @property
    def stats(self) -> ReplicaStats:
        vitals = tuple(self.vitals.values())
        fullest = max(vitals, key=lambda one: one.device_used_bytes / max(1, one.device_total_bytes), default=None)
        return ReplicaStats(
            number=self.number,
            state=self.state,
            running=len(self.scheduler.held),
            work=self.scheduler.work_ms * self.scale / 1000,
            restarts=self.restarts,
            device=self.ready.device if self.ready is not None else "",
            step_time=self.meter.step_time.value or None,
            step_jobs=self.meter.step_jobs.value,
            step_rows=self.meter.step_rows.value,
            weight_bytes=self.ready.device_bytes if self.ready is not None else 0,
            host_memory_bytes=sum(one.resident_bytes for one in vitals),
            device_used_bytes=0 if fullest is None else fullest.device_used_bytes,
            device_total_bytes=0 if fullest is None else fullest.device_total_bytes,
        )

    def expected_lanes(self) -> dict[str, float]:
        """What a prepare and a decode take, in the scheduler's predicted milliseconds."""
        return {"prepare_ms": self.meter.prepare.ms / self.scale, "decode_ms": self.meter.decode.ms / self.scale}

    @property
    def scale(self) -> float:
        """Measured over predicted milliseconds. What was never fitted says one millisecond for any step."""
        fitted = self.scheduler.is_fitted
        return (max(1.0, self.meter.cost_error) if fitted else self.meter.step.ms) or 1.0


def _logged(told: Loading) -> tuple[object, ...]:
    """What of progress is worth a line."""
    return told.phase, told.component, 10 * told.done_bytes // max(1, told.total_bytes)
