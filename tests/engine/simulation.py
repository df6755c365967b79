"""A worker in simulated time: it takes as long for each step as the cost model predicts, so that what a scheduler gives
to whom can be counted over hours of work in a second.
"""

import collections
import dataclasses
import heapq
import itertools

from omni_grpc.config import LimitsConfig
from omni_grpc.engine.fairness import Share
from omni_grpc.engine.items import Lane
from omni_grpc.engine.policy import Claim
from omni_grpc.engine.scheduler import Scheduler
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.plan import CostModel
from omni_grpc.types.request import Draft
from tests.toy import toy_checkpoint

COST = CostModel(fixed=1.0, token=0.1, pair=0.0)
BASE = resolve_request(
    Draft(model="toy", prompt="x"), ServingFacts(toy_checkpoint(), LimitsConfig()), id="base"
).request
PIXELS_A_TOKEN = 256


@dataclasses.dataclass(eq=False)
class Work:
    """A job: its owner, the tokens of its only row, its steps, and when it left the queue and ended."""

    tenant: str
    tokens: int
    steps: int
    rank: int = 0
    id: str = ""
    left: float | None = None
    ended: float | None = None
    taken: int = 0


class Simulation:
    """Times in milliseconds. Decodes and prepares take as long for every job."""

    def __init__(self, *, places=8, shares=(), cost=COST, policy="fcfs", prepare_ms=0.1, decode_ms=0.1, **options):
        self.scheduler = Scheduler(10_000, places, policy=policy, **options)
        self.scheduler.cost = cost
        self.shares = {tenant: share if isinstance(share, Share) else Share(weight=share) for tenant, share in shares}
        self.scheduler.share_of = lambda tenant: self.shares.get(tenant, Share())
        self.seconds_of = {Lane.PREPARE: prepare_ms, Lane.DECODE: decode_ms}
        self.now = 0.0
        self.jobs: dict[str, Work] = {}
        self.served = collections.Counter()
        """Milliseconds by tenant: a step is divided by what each of its jobs would take alone."""
        self.paid = collections.Counter()
        """The same, where what a step takes whoever is in it is divided by weight."""
        self.on_end = lambda work: None
        self._numbers = itertools.count()
        self._reports: list[tuple[float, int, Lane, tuple[str, ...]]] = []

    def add(self, *args, **values) -> Work:
        work = Work(*args, **values)
        work.id = f"{next(self._numbers)}"
        request = dataclasses.replace(
            BASE, id=work.id, steps=work.steps, width=16 * work.tokens, height=PIXELS_A_TOKEN // 16
        )
        self.jobs[work.id] = work
        self.scheduler.add(request, Claim(priority=work.rank), work.tenant)
        return work

    def plan(self) -> None:
        while plan := self.scheduler.plan().plan:
            for request in plan.admit:
                self.jobs[request.id].left = self.now
                self._work(Lane.PREPARE, self.seconds_of[Lane.PREPARE], (request.id,))
            if plan.step:
                self._serve(plan.step)
                self._work(Lane.STEP, self.scheduler.predicted_ms(plan.step), plan.step)
            if plan.decode:
                self._work(Lane.DECODE, self.seconds_of[Lane.DECODE], plan.decode)

    def run(self, until: float = float("inf"), *, stop=lambda: False) -> None:
        """Until that time, or until nothing is left to do."""
        self.plan()
        while self._reports and self._reports[0][0] <= until and not stop():
            self.now, _, lane, ids = heapq.heappop(self._reports)
            self.scheduler.free(lane)
            for job_id in ids:
                self._report(lane, self.jobs[job_id])
            self.plan()

    def waiting(self, tenant: str) -> list[Work]:
        return [work for work in self.jobs.values() if work.tenant == tenant and work.left is None]

    def running(self, tenant: str) -> list[Work]:
        return [w for w in self.jobs.values() if w.tenant == tenant and w.left is not None and w.ended is None]

    def _work(self, lane, seconds, ids) -> None:
        heapq.heappush(self._reports, (self.now + seconds, next(self._numbers), lane, ids))

    def _serve(self, ids) -> None:
        alone = {job_id: self.scheduler.cost.step_ms((self.jobs[job_id].tokens,)) for job_id in ids}
        total, fixed = self.scheduler.predicted_ms(ids), self.scheduler.cost.fixed
        for job_id, own in alone.items():
            self.served[self.jobs[job_id].tenant] += total * own / sum(alone.values())
            self.paid[self.jobs[job_id].tenant] += own - fixed
        weights = {tenant: self.scheduler.share_of(tenant).weight for tenant in {self.jobs[i].tenant for i in ids}}
        for tenant, weight in weights.items():
            self.paid[tenant] += fixed * weight / sum(weights.values())

    def _report(self, lane, work) -> None:
        match lane:
            case Lane.PREPARE:
                self.scheduler.prepared(work.id, (work.tokens,))
            case Lane.STEP:
                work.taken += 1
                self.scheduler.stepped(work.id, work.steps - work.taken, 1)
                if work.taken == work.steps:
                    self.scheduler.denoised(work.id)
            case Lane.DECODE:
                self.scheduler.finish(work.id)
                work.ended = self.now
                self.on_end(work)
