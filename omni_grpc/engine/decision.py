"""What the scheduler has decided, and what it takes to undo it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from omni_grpc.engine.books import TurnsOf
from omni_grpc.engine.fairness import Share
from omni_grpc.engine.items import Lane
from omni_grpc.types.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """What had been received before a plan: `services` of the running jobs, and of the tenants `shares`, `clocks` and
    `turns`. A plan makes new ones and leaves these as they are.
    """

    services: dict[str, float]
    shares: Mapping[str, Share]
    clocks: Mapping[str, float]
    turns: TurnsOf


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A plan, the jobs that it preempts or resumes, and the accounts as they were `before` it."""

    plan: Plan
    preempted: tuple[str, ...]
    resumed: tuple[str, ...]
    before: Accounts


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """The lanes that a plan fills."""
    work = {Lane.PREPARE: plan.admit, Lane.STEP: plan.step, Lane.DECODE: plan.decode_parts or plan.decode}
    return tuple(lane for lane, ids in work.items() if ids)
