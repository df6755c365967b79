"""The engine's state and load."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from omni_grpc.types.plan import CostModel


class EngineState(enum.StrEnum):
    """ASLEEP: its device memory is given back; jobs wait until it is woken."""

    STARTING = "STARTING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    ASLEEP = "ASLEEP"
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
class ReplicaStats:
    """One replica: the jobs that it has, the predicted seconds of their steps, and how often its worker was started
    again. `device`: what it runs on; "" before it is known. `step_time` (seconds), `step_jobs`, `step_rows`: means
    of late; None and 0 before a step. Bytes are 0 where they are not known; see `types/vitals.py`.
    """

    number: int
    state: str
    running: int
    work: float
    restarts: int
    device: str
    step_time: float | None = None
    step_jobs: float = 0.0
    step_rows: float = 0.0
    weight_bytes: int = 0
    host_memory_bytes: int = 0
    device_used_bytes: int = 0
    device_total_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The current load. `tenants` are those that have jobs queued or running. `cost` predicts a step's milliseconds;
    `cost_error` is measured over predicted time. `queue_delay`: seconds that a job made now would wait, by prediction;
    None where nothing is predicted yet. `work`: predicted seconds of all steps that its jobs have still to take.
    """

    queued: int
    running: int
    max_queue: int
    jobs: int
    artifact_bytes: int
    cost: CostModel
    cost_error: float
    worker_restarts: int
    queue_delay: float | None = None
    work: float = 0.0
    replicas: Sequence[ReplicaStats] = ()
    tenants: Mapping[str, TenantStats] = dataclasses.field(default_factory=dict)
