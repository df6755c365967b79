"""How tenants share what there is one of, by weight: start-time fair queueing (Goyal, Vin and Cheng 1996).

What a tenant receives moves its tag forward by cost / weight, and whoever is behind goes first. So in any time in which
two tenants have work, they receive in proportion to their weights, but for the size of one piece of work, whatever the
number and size of their jobs. Who comes back starts where the others are: there is no credit for having been away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Set


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a tenant may have of a server. `weight`: its part of the device time, by the sum of those who have work.
    `max_running`: jobs of it that may have left the queue and not ended; None: as many as there is room for.

    Raises ValueError for a weight that is not a finite number above 0, and for a limit below 1.
    """

    weight: float = 1.0
    max_running: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight is {self.weight}; it must be a finite number above 0")
        if self.max_running is not None and self.max_running < 1:
            raise ValueError(f"max_running is {self.max_running}; it must be at least 1, or None for no limit")


ShareOf = Callable[[str], Share]
"""The share of a tenant as it is now. It may say something else at each call, and must not raise."""


def equal_shares(tenant: str) -> Share:
    """Everybody is equal, and nobody is limited."""
    return Share()


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """The tags of tenants that share one thing, in milliseconds (or another unit of cost) by weight. What happens makes
    new ones of them, so that who keeps the old ones can take it back.
    """

    tags: Mapping[str, float] = dataclasses.field(default_factory=dict)
    active: frozenset[str] = frozenset()
    clock: float = 0.0

    def __getitem__(self, tenant: str) -> float:
        """The tag of a tenant that has work."""
        return self.tags[tenant]

    def tag(self, tenant: str) -> float:
        """The tag of a tenant that may have none: then that of one that comes now."""
        return self.tags.get(tenant, self.clock)

    def follow(self, active: Set[str]) -> Turns:
        """Those who have work now. Who had none before starts no earlier than whoever of the others is the least far,
        and where it was: it owes what it has received ahead of them. When nobody is left, nobody owes anything.
        """
        if active == self.active:
            return self
        staying = self.active & active
        if staying:
            clock = max(self.clock, min(self.tags[tenant] for tenant in staying))
        else:
            clock = max(self.tags.values(), default=self.clock)
        coming = {tenant: max(self.tags.get(tenant, 0.0), clock) for tenant in active - staying}
        tags = {tenant: tag for tenant, tag in self.tags.items() if tenant in staying or tag > clock}
        return Turns(tags | coming, frozenset(active), clock)

    def charge(self, tenant: str, cost: float) -> Turns:
        """`cost`: what a tenant received, divided by its weight."""
        return dataclasses.replace(self, tags={**self.tags, tenant: self.tags[tenant] + cost})
