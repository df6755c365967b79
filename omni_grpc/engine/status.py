"""How an engine is: its state and its load."""

from __future__ import annotations

import dataclasses
import enum

from omni_grpc.types.plan import CostModel


class EngineState(enum.StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The load at this moment. `cost` predicts a step's milliseconds; `cost_error` is what steps took over that."""

    queued: int
    running: int
    max_queue: int
    jobs: int
    artifact_bytes: int
    cost: CostModel
    cost_error: float
    worker_restarts: int
