"""Scheduling policies. A policy ranks jobs; a job of a lower rank never waits for one of a higher rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a policy ranks a job by. `deadline` is in Unix seconds, infinite for a job without one."""

    priority: int = 0
    deadline: float = math.inf


Policy = Callable[[Claim], float]

POLICIES: Mapping[str, Policy] = {
    # everybody is equal: first come, first served
    "fcfs": lambda claim: 0.0,
    # the larger number first
    "priority": lambda claim: -float(claim.priority),
    # the earliest deadline first
    "deadline": lambda claim: claim.deadline,
}
