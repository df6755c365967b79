"""The queue, and in which order jobs leave it: by rank, then fairly between tenants, then first come, first served."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterator, Mapping

from omni_grpc.engine.fairness import Share
from omni_grpc.engine.items import Item

ROUNDING = 1e-9
"""What a product of shares may lack of a whole number of places."""


class Queue:
    """The waiting jobs by rank and tenant, so that a look at the first ones costs nothing for those behind them."""

    def __init__(self) -> None:
        self.ranks: dict[float, dict[str, list[Item]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, item: Item) -> None:
        """A job comes, or comes back to its place."""
        jobs = self.ranks.setdefault(item.rank, {}).setdefault(item.tenant, [])
        bisect.insort(jobs, item, key=_arrival)
        self._count += 1

    def remove(self, item: Item) -> None:
        tenants = self.ranks[item.rank]
        jobs = tenants[item.tenant]
        del jobs[bisect.bisect_left(jobs, item.arrival, key=_arrival)]
        if not jobs:
            del tenants[item.tenant]
        if not tenants:
            del self.ranks[item.rank]
        self._count -= 1

    def place(self, item: Item) -> int | None:
        """The number of jobs that leave before this one, without a look at them: one tenant's go by rank and arrival,
        whatever its limit. None where several tenants wait, whose turns depend on more than the queue.
        """
        place = 0
        for rank, tenants in self.ranks.items():
            if tenants.keys() != {item.tenant}:
                return None
            if rank < item.rank:
                place += len(tenants[item.tenant])
        return place + bisect.bisect_left(self.ranks[item.rank][item.tenant], item.arrival, key=_arrival)

    def count(self, tenant: str) -> int:
        """The number of one tenant's jobs."""
        return sum(len(tenants.get(tenant, ())) for tenants in self.ranks.values())


def _arrival(item: Item) -> int:
    return item.arrival


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the order depends on beside the jobs. `total`: the places of those that share steps; `tag`: a tenant's tag
    at a rank; `step`: the predicted milliseconds of a job's step alone; `work`: those of all that it has still to take;
    `elsewhere`: a tenant's running jobs that are not among these.
    """

    total: int
    shares: Mapping[str, Share]
    tag: Callable[[float, str], float]
    step: Callable[[Item], float]
    work: Callable[[Item], float]
    elsewhere: Callable[[str], int] = lambda tenant: 0


class Places:
    """The places of one rank: those that higher ranks leave of the total, and who has them. `active` are the jobs that
    have left the queue; `above` more of a higher rank are about to.
    """

    def __init__(self, queue: Queue, active: Collection[Item], rank: float, view: View, *, above: int = 0) -> None:
        self.held: collections.Counter[str] = collections.Counter()
        tenants = set(queue.ranks.get(rank, ()))
        for item in active:
            if item.inside and item.rank < rank:
                above += 1
            elif item.inside and item.rank == rank:
                self.held[item.tenant] += 1
                tenants.add(item.tenant)
        self._taken = self.held.total()
        self._places = view.total - above
        self._weights = {tenant: view.shares[tenant].weight for tenant in tenants}
        self._sum = sum(self._weights.values())

    @property
    def full(self) -> bool:
        return self._taken >= self._places

    def take(self, tenant: str) -> None:
        self.held[tenant] += 1
        self._taken += 1

    def entitled(self, tenant: str) -> bool:
        """Whether a tenant has fewer places than its weight gives it, of which it has one at least, if there are any.
        Then it need not wait for the end of another tenant's job.
        """
        if self._places <= 0:
            return False
        part = int(self._places * self._weights[tenant] / self._sum + ROUNDING)
        return self.held[tenant] < max(1, part)


def leaving(queue: Queue, active: Collection[Item], view: View) -> Iterator[Item]:
    """The waiting jobs, in the order in which they leave if nothing else comes and all predictions hold.

    A tenant's place in line is its tag, moved by all that its jobs inside have still to receive; each job that leaves
    moves it further. Jobs that may not leave before another one of their tenant has ended come after those that may.
    """
    running = collections.Counter(item.tenant for item in active)
    for tenant in view.shares:
        running[tenant] += view.elsewhere(tenant)
    above = 0
    held_back: list[_Line] = []
    for rank in sorted(queue.ranks):
        line = _Line(queue, active, rank, view)
        for item in line.walk(Places(queue, active, rank, view, above=above), running):
            yield item
            above += 1
        held_back.append(line)
    for line in held_back:
        yield from line.walk(None, None)


class _Line:
    """The tenants at one rank. Whoever's tag is the least is next."""

    def __init__(self, queue: Queue, active: Collection[Item], rank: float, view: View) -> None:
        self._jobs = queue.ranks[rank]
        self._next = dict.fromkeys(self._jobs, 0)
        self._view = view
        self._tags = {tenant: view.tag(rank, tenant) for tenant in self._jobs}
        for item in active:
            if item.rank == rank and item.inside and item.tenant in self._tags:
                self._move(item)

    def walk(self, places: Places | None, running: collections.Counter[str] | None) -> Iterator[Item]:
        """Takes the jobs out. With `running`, only those that the limits of their tenants let leave; with `places`,
        those who are entitled to one go first once all are taken.
        """
        heap = [self._entry(tenant) for tenant in self._jobs if self._next[tenant] < len(self._jobs[tenant])]
        heapq.heapify(heap)
        while heap:
            entry = heap[0]
            if places is not None and places.full:
                entry = min((entry for entry in heap if places.entitled(entry[2])), default=entry)
            tenant = entry[2]
            if entry is heap[0]:
                heapq.heappop(heap)
            else:
                heap.remove(entry)
                heapq.heapify(heap)
            limit = self._view.shares[tenant].max_running
            if running is not None and limit is not None and running[tenant] >= limit:
                continue
            item = self._jobs[tenant][self._next[tenant]]
            yield item
            self._next[tenant] += 1
            self._move(item)
            if running is not None:
                running[tenant] += 1
            if places is not None:
                places.take(tenant)
            if self._next[tenant] < len(self._jobs[tenant]):
                heapq.heappush(heap, self._entry(tenant))

    def _entry(self, tenant: str) -> tuple[float, int, str]:
        return (self._tags[tenant], self._jobs[tenant][self._next[tenant]].arrival, tenant)

    def _move(self, item: Item) -> None:
        # alone, a tenant is first whatever its jobs cost
        if len(self._jobs) > 1:
            self._tags[item.tenant] += self._view.work(item) / self._view.shares[item.tenant].weight
