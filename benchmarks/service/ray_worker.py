"""The worker of `quick_worker` in a Ray actor: it has no model, so that a life of it is short."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.service.quick_worker import STEP, QuickWorker
from omni_grpc.config import EngineConfig
from omni_grpc.engine import ray_driver
from omni_grpc.types.plan import Order, Plan, Ready, Report
from omni_grpc.types.spec import Checkpoint

DRIVER = "benchmarks.service.ray_worker:serve"
WORKER = "benchmarks.service.ray_worker:InActor"


def serve(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> None:
    """Body of the driver."""
    ray_driver.serve(connection, config, checkpoint, prefix, worker=WORKER)


class InActor:
    """Carries out one plan after the other, in a thread of its own."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, send: Callable[[Report], None], prefix: str
    ) -> None:
        self.send = send
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._worker = QuickWorker(self, prefix, float(os.environ.get(STEP, "0.02")))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        self._plans.put(plan)

    def order(self, order: Order) -> None:
        raise NotImplementedError("it has no model to move")

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._worker.carry_out(plan)
