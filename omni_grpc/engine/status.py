"""The engine's state and load."""

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
    """The current load. `cost` predicts a step's milliseconds; `cost_error` is measured over predicted time."""

    queued: int
    running: int
    max_queue: int
    jobs: int
    artifact_bytes: int
    cost: CostModel
    cost_error: float
    worker_restarts: int
