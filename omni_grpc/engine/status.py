"""The engine's state and load."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from omni_grpc.types.plan import CostModel


class EngineState(enum.StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """What one tenant has: jobs, and bytes of outputs, of uploads and of decoded inputs that wait for their job."""

    queued: int = 0
    running: int = 0
    artifact_bytes: int = 0
    asset_bytes: int = 0
    input_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The current load. `tenants` are those that have jobs queued or running. `cost` predicts a step's milliseconds;
    `cost_error` is measured over predicted time.
    """

    queued: int
    running: int
    max_queue: int
    jobs: int
    artifact_bytes: int
    cost: CostModel
    cost_error: float
    worker_restarts: int
    tenants: Mapping[str, TenantStats] = dataclasses.field(default_factory=dict)
