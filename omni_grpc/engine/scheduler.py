"""What runs next. Pure Python: it sees ids, ranks and token counts, never tensors, clocks or events.

A job waits, is prepared, takes steps with the other running jobs, is decoded, and is gone. Each phase has one lane in
the worker; a lane is busy from the plan that fills it to the report that frees it, so that a long encode or decode
never holds up the steps of the others.

Three rules share the steps. Rank comes first: a job that outranks others takes its steps before them, and they are
preempted until it is done. Among equals in rank, tenants share the time by weight (`fairness.py`): it is the turn of
the one whose next step would end first in virtual time (weighted fair queueing, Demers et al. 1989), and no tenant
joins that is ahead of its share. Among a tenant's jobs it is likewise the turn of the one whose next step would end
first. Others join its step unless that makes it too long: so big jobs and small ones take turns, and a stream of either
cannot starve the other. A server without tenants has one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

from omni_grpc.engine.books import Books
from omni_grpc.engine.decision import Accounts, Decision, lanes
from omni_grpc.engine.fairness import ShareOf
from omni_grpc.engine.items import Item, Lane, Phase
from omni_grpc.engine.leaving import Places
from omni_grpc.engine.policy import Claim
from omni_grpc.engine.room import Room
from omni_grpc.engine.wait import Pace
from omni_grpc.resolve.memory_fit import too_large
from omni_grpc.resolve.work import pixels
from omni_grpc.types.errors import Failure
from omni_grpc.types.memory_model import MemoryModel, Need
from omni_grpc.types.plan import CostModel, Plan
from omni_grpc.types.request import Request

FAIR_SHARE = 1.25
"""How long a shared step may be, where no limit is set: so many times what its jobs would take in turns if each took
as long as the one whose turn it is. Equal jobs always share; a small job waits for no big one in its own step.
"""


class Scheduler:
    """Every job it holds is in exactly one phase.

    At most `max_num_seqs` jobs share a step, and no job joins one that it would make longer than `max_step_ms` or, if
    that is None, than FAIR_SHARE allows; a job that is longer than that alone takes its steps alone. The states of
    preempted jobs stay in the worker, so at most 2 * max_num_seqs jobs are prepared or running at any time; so do those
    of tenants that had all the places before another one came. No more than `memory` predicts to fit comes in, shares a
    step or is decoded at once: see `room.py`. The first in line waits for it, and those behind wait with it.
    """

    def __init__(
        self,
        max_queue: int,
        max_num_seqs: int,
        *,
        policy: str = "fcfs",
        max_step_ms: float | None = None,
        books: Books | None = None,
    ) -> None:
        """`books`: those of the model, where it has other replicas; `max_queue` and `policy` are theirs then."""
        self.books = Books(max_queue, policy=policy) if books is None else books
        self.books.places += max_num_seqs
        self.max_num_seqs = max_num_seqs
        self.max_step_ms = max_step_ms
        self.exclusive = False
        """One job at a time, from its prepare to the end of its decode."""
        self._cost = CostModel()
        self._memory = MemoryModel()
        self._active: dict[str, Item] = {}
        """Those that have left the queue for this replica."""
        self._clocks: Mapping[str, float] = {}
        """By tenant: the service of a job of it here that had always received its fair share."""
        self._flying: dict[Lane, Sequence[Item]] = {}
        """The busy lanes, and the jobs that they work on."""
        self._dropped: list[str] = []
        self._closed = False

    def __contains__(self, job_id: str) -> bool:
        return job_id in self.books.items

    @property
    def closed(self) -> bool:
        """Whether it takes no more jobs from the queue. Those that it has go on."""
        return self._closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        if closed is not self._closed:
            self._closed = closed
            self.books.places += -self.max_num_seqs if closed else self.max_num_seqs
            for item in self._active.values():
                item.closing = closed

    @property
    def quiet(self) -> bool:
        """Whether its worker has nothing, and nothing to do."""
        return not (self._active or self._flying or self._dropped)

    @property
    def held(self) -> list[str]:
        """The jobs that have left the queue for this replica."""
        return list(self._active)

    @property
    def cost(self) -> CostModel:
        """What a step takes here."""
        return self._cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        # the replicas of a model run on equal devices: the newest fit is as good as any
        self._cost = self.books.cost = cost

    @property
    def memory(self) -> MemoryModel:
        """What requests take of the device here."""
        return self._memory

    @memory.setter
    def memory(self, memory: MemoryModel) -> None:
        self._memory = self.books.memory = memory

    @property
    def memory_taken(self) -> float:
        """Bytes beyond the weights that all that is in the worker is predicted to take now."""
        return self._room.taken

    @property
    def is_fitted(self) -> bool:
        """Whether the cost is one that was measured."""
        return self._cost != CostModel()

    @property
    def share_of(self) -> ShareOf:
        """The share of a tenant, asked at each plan."""
        return self.books.share_of

    @share_of.setter
    def share_of(self, share_of: ShareOf) -> None:
        self.books.share_of = share_of

    @property
    def max_queue(self) -> int:
        return self.books.max_queue

    @property
    def waiting(self) -> int:
        return self.books.waiting

    @property
    def active(self) -> int:
        """The number of jobs that have left the queue, for any replica, and are not finished."""
        return len(self.books.active)

    @property
    def work_ms(self) -> float:
        """Predicted milliseconds of all that the jobs of this replica have still to do."""
        return sum(map(self.books.work, self._active.values()))

    @property
    def has_place(self) -> bool:
        """Whether one more job could take steps beside those that do."""
        inside = sum(item.inside for item in self._active.values())
        return inside < self.max_num_seqs and not (self.exclusive and self._active)

    @property
    def work_before_ms(self) -> float:
        """Predicted milliseconds until a place is free: with jobs that share steps, until the one with the least work
        has been served in turn with the others.
        """
        work = [self.books.work(item) for item in self._active.values() if item.inside]
        return 0.0 if len(work) < self.max_num_seqs and not self.exclusive else sum(min(work) for _ in work)

    def has(self, job_id: str) -> bool:
        """Whether a job has left the queue for this replica."""
        return job_id in self._active

    def busy(self, lane: Lane) -> bool:
        return lane in self._flying

    def position(self, job_id: str) -> int:
        """The number of jobs that leave the queue before this one; 0 for a job that has left it."""
        return self.books.position(job_id)

    def expected_wait(self, tenant: str, *, prepare_ms: float = 0.0, decode_ms: float = 0.0) -> float:
        """Milliseconds until the next waiting job of a tenant leaves the queue, or where none waits, until one that
        runs ends: `wait.expected_wait`. `prepare_ms` and `decode_ms` are what those phases take of a job.
        """
        return self.books.expected_wait(
            tenant, Pace(prepare_ms=prepare_ms, decode_ms=decode_ms, exclusive=self.exclusive)
        )

    def phase(self, job_id: str) -> Phase:
        return self.books.items[job_id].phase

    def check_room(self) -> None:
        """Raises ResourceExhausted (QUEUE_FULL) where there is no room in the queue."""
        self.books.check_room()

    def add(
        self,
        request: Request,
        claim: Claim = Claim(),  # noqa: B008 - frozen
        tenant: str = "",
        *,
        segments: int = 1,
    ) -> None:
        """Puts a job in the queue. Raises like `check_room`. `segments`: parts of its output, each with all steps."""
        self.check_room()
        self.books.add(request, claim, tenant, segments=segments)

    def plan(self) -> Decision:
        """Work for every free lane. The lanes that it fills are busy until `free`."""
        services = {item.request.id: item.service for item in self._in(Phase.RUNNING)}
        before = Accounts(services, self.books.shares, self._clocks, self.books.turns)
        self._follow()
        admit = self._admit() if not self.busy(Lane.PREPARE) else ()
        taken, preempted = self._step() if not self.busy(Lane.STEP) else ([], [])
        self._charge(taken)
        resumed = [item for item in taken if item.preempted]
        for item in resumed + preempted:
            item.preempted = not item.preempted
        decode_parts, decode = self._decode() if not self.busy(Lane.DECODE) else ((), ())
        dropped, self._dropped = tuple(self._dropped), []
        plan = Plan(admit=admit, step=_ids(taken), decode_parts=decode_parts, decode=decode, drop=dropped)
        return Decision(plan, _ids(preempted), _ids(resumed), before)

    def undo(self, decision: Decision) -> None:
        """The newest plan did not reach the worker, so it never was: the jobs that it admitted return to their place in
        the queue, nobody has paid for its step or its decode, and nobody was preempted by it.
        """
        plan, before = decision.plan, decision.before
        for job_id in decision.preempted + decision.resumed:
            self.books.items[job_id].preempted = job_id in decision.resumed
        for job_id, service in before.services.items():
            self.books.items[job_id].service = service
        self.books.shares, self.books.turns, self._clocks = before.shares, before.turns, before.clocks
        for request in plan.admit:
            self._return(self.books.items[request.id])
        for job_id in plan.decode:
            self.books.items[job_id].phase = Phase.DECODE_QUEUED
        for job_id in plan.decode_parts:
            self.books.items[job_id].part_ready = True
        self._dropped[:0] = plan.drop
        for lane in lanes(plan):
            self.free(lane)

    def free(self, lane: Lane) -> None:
        """The worker reported, so its lane can take more work."""
        del self._flying[lane]

    def prepared(self, job_id: str, rows: tuple[int, ...]) -> None:
        """A job can take steps; `rows` are the tokens of each of its rows. Ignored for a removed job."""
        if (item := self.books.items.get(job_id)) is not None:
            item.phase, item.rows, item.service = Phase.RUNNING, rows, self._clocks[item.tenant]
            item.need = self._memory.need(item.request, rows)
            self.books.estimate.learn(item.request, rows)

    def too_large(self, job_id: str) -> Failure | None:
        """Why a job that is prepared does not fit in memory after all; None where it does, and for a removed job."""
        item = self.books.items.get(job_id)
        return None if item is None else too_large(item.need, self._memory)

    def stepped(self, job_id: str, left: int, evals: int) -> None:
        """A job has taken a step of `evals` forwards and has `left` to take. Ignored for a removed job."""
        if (item := self.books.items.get(job_id)) is not None:
            item.left, item.evals = left, max(item.evals, evals)

    def denoised(self, job_id: str) -> None:
        """A job has taken its last step. Ignored for a removed job."""
        if (item := self.books.items.get(job_id)) is not None:
            item.phase = Phase.DECODE_QUEUED

    def part_ready(self, job_id: str) -> None:
        """Part of a job's output can be decoded while the job goes on. Ignored for a removed job."""
        if (item := self.books.items.get(job_id)) is not None:
            item.part_ready = True

    def finish(self, job_id: str) -> None:
        """A job is over in the worker too: it ended, or it failed and its state was dropped there."""
        if (item := self._active.pop(job_id, None)) is not None:
            self.books.forget(item)

    def remove(self, job_id: str) -> Phase:
        """Removes a job that waits, or that this replica has, and returns its phase. The next plan tells the worker to
        drop the job's state.
        """
        item = self.books.items[job_id]
        self.books.forget(item)
        if self._active.pop(job_id, None) is not None:
            self._dropped.append(job_id)
        return item.phase

    def reset(self) -> tuple[list[str], list[str]]:
        """The worker is gone, so all lanes are free. Returns the jobs that it held, which are removed, and those that
        it had not prepared yet: they have lost nothing, and return to their place in the queue.

        A job is requeued once. If a second worker is lost while it prepares the same job, the job may well be the
        cause.
        """
        back = [item for item in self._in(Phase.PREPARING) if not item.final]
        for item in back:
            self._return(item)
            item.final = True
        lost = list(self._active)
        for item in self._active.values():
            self.books.forget(item)
        self._active.clear()
        self._flying.clear()
        self._dropped.clear()
        return lost, list(_ids(back))

    def blame(self) -> None:
        """The worker hangs in its prepare lane and will be killed: the jobs in that lane will not be requeued."""
        for item in self._in(Phase.PREPARING):
            item.final = True

    def predicted_ms(self, job_ids: Iterable[str]) -> float:
        """The milliseconds that the cost model predicts for a step of these jobs; 0 for none."""
        rows = [tokens for job_id in job_ids for tokens in self.books.items[job_id].rows]
        return self.cost.step_ms(rows) if rows else 0.0

    def _return(self, item: Item) -> None:
        """To its place in the queue."""
        del self._active[item.request.id]
        item.need = Need()
        self.books.put_back(item)

    def _follow(self) -> None:
        """Asks who has work now."""
        self.books.follow()
        self._clocks = {tenant: self._clocks.get(tenant, 0.0) for tenant in self.books.shares}

    def _admit(self) -> tuple[Request, ...]:
        """The first job in the queue, if it may leave and there is a place for it: one is free, a job of a lower rank
        has it, or a tenant that has more of them than is its part.
        """
        books = self.books
        if self._closed or not books.queue or (self.exclusive and self._active):
            return ()
        if sum(item.inside for item in self._active.values()) >= 2 * self.max_num_seqs:
            return ()
        first = next(books.leaving())
        if not books.may_leave(first.tenant):
            return ()
        places = Places(books.queue, books.active.values(), first.rank, books.view)
        if places.full and not places.entitled(first.tenant):
            return ()
        if not places.full and self._is_full(first.rank):
            # there is a place, at another replica
            return ()
        need = self._memory.need(first.request)
        if not self._room.admits(first, need):
            return ()
        books.take(first)
        first.need = need
        self._active[first.request.id] = first
        first.phase = Phase.PREPARING
        self._flying[Lane.PREPARE] = (first,)
        return (first.request,)

    def _is_full(self, rank: float) -> bool:
        """Whether jobs of this rank and above have all places of this replica."""
        return sum(item.inside and item.rank <= rank for item in self._active.values()) >= self.max_num_seqs

    def _step(self) -> tuple[list[Item], list[Item]]:
        """The jobs of the next step, and those that are preempted by it."""
        running = self._in(Phase.RUNNING)
        if not running:
            return [], []
        room = self._room
        chosen: list[Item] = []
        aside: list[Item] = []
        """Those that were not left out because their tenant has had its share: that is no preemption."""
        ends: dict[float, float] = {}
        for item in self._in_turn(running):
            turns = self.books.turns[Lane.STEP, item.rank]
            end = ends.setdefault(item.rank, turns[item.tenant] + self._by_weight(item))
            if turns[item.tenant] > end:
                continue
            if not chosen and not room.steps([item]):
                # whoever's turn it is waits until another lane is done
                return [], []
            if len(chosen) < self.max_num_seqs and (not chosen or self._fits([*chosen, item], room)):
                chosen.append(item)
            else:
                aside.append(item)
        best = chosen[0].rank
        preempted = [item for item in aside if item.rank > best and not item.preempted]
        self._flying[Lane.STEP] = chosen
        # in order of arrival, so that the batch stays the same from step to step and its packed constants can be kept
        return sorted(chosen, key=lambda item: item.arrival), preempted

    def _in_turn(self, running: list[Item]) -> list[Item]:
        """By rank, then the jobs of the tenant whose next step would end first, then the job whose would."""

        def turn(item: Item) -> tuple[float, int]:
            return (item.service + self.cost.step_ms(item.rows), item.arrival)

        first: dict[tuple[float, str], Item] = {}
        for item in sorted(running, key=turn):
            first.setdefault((item.rank, item.tenant), item)
        tenants = {
            (rank, tenant): (rank, self.books.turns[Lane.STEP, rank][tenant] + self._by_weight(item), item.arrival)
            for (rank, tenant), item in first.items()
        }
        return sorted(running, key=lambda item: (*tenants[item.rank, item.tenant], *turn(item)))

    def _by_weight(self, item: Item) -> float:
        """How far a step alone moves the tag of its job's tenant."""
        return self.cost.step_ms(item.rows) / self.books.shares[item.tenant].weight

    def _charge(self, chosen: list[Item]) -> None:
        """Divides the time of a step among those who take it: what it takes whoever is in it among the tenants by their
        weights, the rest by what each brings along, and a tenant's part among its jobs.

        A tenant's clock is what a job of it would have by now that had always received its fair share: a new job starts
        there, so that it owes nothing and is owed nothing.
        """
        by_tenant: dict[str, list[Item]] = {}
        for item in chosen:
            by_tenant.setdefault(item.tenant, []).append(item)
        weights = {tenant: self.books.shares[tenant].weight for tenant in by_tenant}
        jobs = collections.Counter(item.tenant for item in self._in(Phase.RUNNING))
        for tenant, items in by_tenant.items():
            rows = [tokens for item in items for tokens in item.rows]
            others = 1.0 - weights[tenant] / sum(weights.values())
            part = self.cost.step_ms(rows) - self.cost.fixed * others
            alone = [self.cost.step_ms(item.rows) for item in items]
            for item, own in zip(items, alone, strict=True):
                cost = part * own / (sum(alone) or 1.0)
                self.books.charge((Lane.STEP, item.rank), tenant, cost)
                # a job without rows is one that runs alone, so that there is no other to take turns with
                item.service += cost if rows else 0.0
            if rows:
                self._clocks = {**self._clocks, tenant: self._clocks[tenant] + part / jobs[tenant]}

    @property
    def _room(self) -> Room:
        return Room(self._memory, self._active.values(), self._flying)

    def _fits(self, items: list[Item], room: Room) -> bool:
        """Whether these may share a step; the first is the one whose turn it is."""
        if not room.steps(items):
            return False
        shared = self.cost.step_ms([tokens for item in items for tokens in item.rows])
        if self.max_step_ms is not None:
            return shared <= self.max_step_ms
        return shared <= FAIR_SHARE * len(items) * self.cost.step_ms(items[0].rows)

    def _decode(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The job whose finished part is decoded next, or the one that is decoded for good."""
        queue = self._in(Phase.DECODE_QUEUED)
        queue += [item for item in self._in(Phase.RUNNING) if item.part_ready]
        if not queue:
            return (), ()
        first = min(queue, key=self._decode_turn(queue))
        if not self._room.decodes(first):
            return (), ()
        self.books.charge((Lane.DECODE, first.rank), first.tenant, _decode_cost(first))
        self._flying[Lane.DECODE] = (first,)
        if first.phase is Phase.RUNNING:
            first.part_ready = False
            return (first.request.id,), ()
        first.phase = Phase.DECODING
        return (), (first.request.id,)

    def _decode_turn(self, queue: list[Item]) -> Callable[[Item], tuple[float, float, int]]:
        """The order of decodes: as of steps, by the size of what is decoded; a tenant's own in order of arrival."""
        ends: dict[tuple[float, str], float] = {}
        for item in sorted(queue, key=lambda item: item.order):
            tag = self.books.turns[Lane.DECODE, item.rank][item.tenant]
            ends.setdefault((item.rank, item.tenant), tag + _decode_cost(item) / self.books.shares[item.tenant].weight)
        return lambda item: (item.rank, ends[item.rank, item.tenant], item.arrival)

    def _in(self, *phases: Phase) -> list[Item]:
        return [item for item in self._active.values() if item.phase in phases]


def _decode_cost(item: Item) -> float:
    return pixels(item.request) / item.segments


def _ids(items: Iterable[Item]) -> tuple[str, ...]:
    return tuple(item.request.id for item in items)
