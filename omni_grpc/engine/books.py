"""What the replicas of a model share: one queue, and what each tenant has received over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from omni_grpc.engine.estimate import Estimate
from omni_grpc.engine.fairness import Share, ShareOf, Turns, equal_shares
from omni_grpc.engine.items import Item, Lane, Phase
from omni_grpc.engine.leaving import Queue, View, leaving
from omni_grpc.engine.policy import POLICIES, Claim
from omni_grpc.engine.wait import Pace, expected_wait
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.memory_model import MemoryModel
from omni_grpc.types.plan import CostModel
from omni_grpc.types.request import Request

TurnsOf = Mapping[tuple[Lane, float], Turns]
"""Of tenants, by lane and rank."""


class Books:
    """The jobs of one model, those that wait and those that a replica has. `places`: how many of them may share steps,
    over all replicas.

    A rank, a tenant's weight and its limit hold over all replicas: what a tenant receives of any of them moves the one
    tag that it has.
    """

    def __init__(self, max_queue: int, *, policy: str = "fcfs") -> None:
        self.max_queue = max_queue
        self.places = 0
        self.cost = CostModel()
        self.memory = MemoryModel()
        self.share_of: ShareOf = equal_shares
        """The share of a tenant, asked at each plan."""
        self.elsewhere: Callable[[str], int] = lambda tenant: 0
        """A tenant's running jobs of other models: its limit holds over all."""
        self.estimate = Estimate()
        self.queue = Queue()
        self.items: dict[str, Item] = {}
        self.active: dict[str, Item] = {}
        """Those that have left the queue."""
        self.shares: Mapping[str, Share] = {}
        self.turns: TurnsOf = {}
        self._rank = POLICIES[policy]
        self._arrivals = itertools.count()
        self._position: dict[str, int] | None = None
        """Positions in the queue by id, until something changes."""

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def tenants(self) -> list[str]:
        """Those that have jobs here."""
        waiting = {tenant for tenants in self.queue.ranks.values() for tenant in tenants}
        return sorted(waiting.union(item.tenant for item in self.active.values()))

    def is_waiting(self, job_id: str) -> bool:
        """Whether a job is in the queue."""
        return job_id in self.items and self.items[job_id].phase is Phase.WAITING

    def running_of(self, tenant: str) -> int:
        """The number of a tenant's jobs that have left the queue and are not finished."""
        return sum(item.tenant == tenant for item in self.active.values())

    def position(self, job_id: str) -> int:
        """The number of jobs that leave the queue before this one; 0 for a job that has left it."""
        if not self.is_waiting(job_id):
            return 0
        if (place := self.queue.place(self.items[job_id])) is not None:
            return place
        if self._position is None:
            self._position = {item.request.id: place for place, item in enumerate(self.leaving())}
        return self._position[job_id]

    def leaving(self) -> Iterator[Item]:
        """The waiting jobs, in the order in which they leave."""
        return leaving(self.queue, self.active.values(), self.view)

    def expected_wait(self, tenant: str, pace: Pace) -> float:
        """Milliseconds: `wait.expected_wait`."""
        self.follow()
        return expected_wait(tenant, self.queue, self.active.values(), self.view, pace)

    def may_leave(self, tenant: str) -> bool:
        """Whether its limit lets one more job of a tenant run."""
        limit = self.shares[tenant].max_running
        return limit is None or self.running_of(tenant) + self.elsewhere(tenant) < limit

    @property
    def waiting_ms(self) -> float:
        """Predicted milliseconds of all steps of the jobs that wait, each alone."""
        return sum(
            self.work(item) for tenants in self.queue.ranks.values() for jobs in tenants.values() for item in jobs
        )

    def sharing(self, places: int) -> float:
        """What a step of so many jobs takes, over what they would take one after the other; 1 where none shares."""
        inside = [item for item in self.active.values() if item.inside]
        waiting = (item for tenants in self.queue.ranks.values() for jobs in tenants.values() for item in jobs)
        together = list(itertools.islice(itertools.chain(inside, waiting), places))
        rows = [item.rows or self.estimate.rows(item.request) for item in together]
        alone = sum(self.cost.step_ms(of_one) for of_one in rows)
        return self.cost.step_ms([tokens for of_one in rows for tokens in of_one]) / alone if alone else 1.0

    @property
    def view(self) -> View:
        return View(
            # where no job comes any more, the places are as many as are taken
            total=self.places + sum(item.inside and item.closing for item in self.active.values()),
            shares=self.shares,
            tag=self._tag,
            step=self.step_ms,
            work=self.work,
            elsewhere=self.elsewhere,
        )

    def step_ms(self, item: Item) -> float:
        """Predicted milliseconds of a step of this job alone."""
        return self.cost.step_ms(item.rows or self.estimate.rows(item.request))

    def work(self, item: Item) -> float:
        """Predicted milliseconds of the steps that a job has still to take, each alone."""
        return item.left * item.evals * self.step_ms(item)

    def _tag(self, rank: float, tenant: str) -> float:
        return self.turns[Lane.STEP, rank].tag(tenant) if (Lane.STEP, rank) in self.turns else 0.0

    # --- changes ------------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises ResourceExhausted (QUEUE_FULL) where there is no room in the queue."""
        if self.waiting >= self.max_queue:
            raise ResourceExhausted(
                f"the queue is full: {self.max_queue} jobs are waiting (--max-queue); retry later",
                reason="QUEUE_FULL",
                retry_after=1.0,
            )

    def add(self, request: Request, claim: Claim, tenant: str, *, segments: int) -> None:
        """Puts a job in the queue."""
        item = self.items[request.id] = Item(
            request, self._rank(claim), next(self._arrivals), tenant, left=request.steps * segments, segments=segments
        )
        self.queue.add(item)
        self.follow()

    def take(self, item: Item) -> None:
        """A job leaves the queue: a replica has it."""
        self.queue.remove(item)
        self.active[item.request.id] = item
        self._position = None

    def put_back(self, item: Item) -> None:
        """A job returns to its place in the queue."""
        del self.active[item.request.id]
        item.phase, item.closing = Phase.WAITING, False
        self.queue.add(item)
        self._position = None

    def forget(self, item: Item) -> None:
        """A job is over."""
        del self.items[item.request.id]
        if self.active.pop(item.request.id, None) is None:
            self.queue.remove(item)
        self._position = None

    def charge(self, key: tuple[Lane, float], tenant: str, cost: float) -> None:
        """A tenant received this much of a lane, at a rank."""
        charged = self.turns[key].charge(tenant, cost / self.shares[tenant].weight)
        self.turns = {**self.turns, key: charged}

    def follow(self) -> None:
        """Asks for the shares, and tells turns who has work: of a tenant at its limit, waiting jobs are none."""
        self._position = None
        self.shares = {tenant: self.share_of(tenant) for tenant in self.tenants}
        active: dict[tuple[Lane, float], set[str]] = {}
        for rank, tenants in self.queue.ranks.items():
            if able := {tenant for tenant in tenants if self.may_leave(tenant)}:
                active[Lane.STEP, rank] = able
        for item in self.active.values():
            if item.inside:
                active.setdefault((Lane.STEP, item.rank), set()).add(item.tenant)
            if item.part_ready or item.phase in (Phase.DECODE_QUEUED, Phase.DECODING):
                active.setdefault((Lane.DECODE, item.rank), set()).add(item.tenant)
        # where nobody has work, nobody is ahead
        self.turns = {key: self.turns.get(key, Turns()).follow(able) for key, able in active.items()}
