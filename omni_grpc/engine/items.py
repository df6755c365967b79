"""A job as the scheduler sees it: where it is, what it ranks, and what it still costs."""

from __future__ import annotations

import dataclasses
import enum

from omni_grpc.types.memory_model import Need
from omni_grpc.types.request import Request


class Phase(enum.StrEnum):
    WAITING = "WAITING"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    DECODE_QUEUED = "DECODE_QUEUED"
    DECODING = "DECODING"


class Lane(enum.StrEnum):
    """A line of work in the worker that does one thing at a time."""

    PREPARE = "prepare"
    STEP = "step"
    DECODE = "decode"


@dataclasses.dataclass(slots=True, eq=False)
class Item:
    """A job in the scheduler. `service`: predicted milliseconds of steps it has received, counted from its fair start;
    `left`: steps that it has still to take; `evals`: forwards that one of them takes, as far as is known; `segments`:
    parts that its output is made in; `final`: it is not requeued when its worker is lost; `need`: the memory that its
    worker predicts for it, nothing while it waits; `closing`: the replica that has it takes no more jobs.
    """

    request: Request
    rank: float
    arrival: int
    tenant: str = ""
    left: int = 0
    segments: int = 1
    evals: int = 1
    phase: Phase = Phase.WAITING
    rows: tuple[int, ...] = ()
    service: float = 0.0
    preempted: bool = False
    part_ready: bool = False
    final: bool = False
    need: Need = dataclasses.field(default_factory=Need)
    closing: bool = False

    @property
    def order(self) -> tuple[float, int]:
        return (self.rank, self.arrival)

    @property
    def inside(self) -> bool:
        """Whether it has one of the places of those that share steps."""
        return self.phase in (Phase.PREPARING, Phase.RUNNING)
