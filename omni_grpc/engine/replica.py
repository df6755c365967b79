"""One worker of a model, with the jobs that it has."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

from omni_grpc.config import EngineConfig
from omni_grpc.engine.books import Books
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.meter import Meter
from omni_grpc.engine.scheduler import Scheduler
from omni_grpc.types.errors import Failure
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Ready, Report


class ReplicaState(enum.StrEnum):
    """DRAINING: it ends what it has, and is then started anew."""

    STARTING = "STARTING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    DRAINING = "DRAINING"
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

    @property
    def owner(self) -> str:
        """The owner of its timers."""
        return f"worker {self.number}"

    @property
    def open(self) -> bool:
        """Whether it can be given work."""
        return self.state is ReplicaState.READY and self.failure is None

    def start(self, deliver: Callable[[Replica, Report], None]) -> None:
        """Starts its worker, whose reports are delivered with it."""
        self.loading = Loading()
        self.executor.start(partial(deliver, self))

    def on_ready(self, report: Ready, *, exclusive: bool) -> None:
        self.ready, self.failure, self.failures = report, None, 0
        self.state = ReplicaState.READY
        self.scheduler.exclusive = exclusive
        self.scheduler.cost = report.cost
        self.scheduler.memory = report.memory

    def expected_lanes(self) -> dict[str, float]:
        """What a prepare and a decode take, in the scheduler's predicted milliseconds."""
        return {"prepare_ms": self.meter.prepare.ms / self.scale, "decode_ms": self.meter.decode.ms / self.scale}

    @property
    def scale(self) -> float:
        """Measured over predicted milliseconds. What was never fitted says one millisecond for any step."""
        fitted = self.scheduler.is_fitted
        return (max(1.0, self.meter.cost_error) if fitted else self.meter.step.ms) or 1.0
