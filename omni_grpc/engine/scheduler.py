"""What runs next. Pure Python: it sees ids, ranks and token counts, never tensors, clocks or events.

A job waits, is prepared, takes steps with the other running jobs, is decoded, and is gone. Each phase has one lane in
the worker; a lane is busy from the plan that fills it to the report that frees it, so that a long encode or decode
never holds up the steps of the others.

Two rules share the steps. Rank comes first: a job that outranks others takes its steps before them, and they are
preempted until it is done. Among equals, it is the turn of the job whose next step would end first in virtual time
(weighted fair queueing, Demers et al. 1989). Others join its step unless that makes it too long: so big jobs and small
ones take turns, and a stream of either cannot starve the other.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable

from omni_grpc.engine.policy import POLICIES, Claim
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.plan import CostModel, Plan
from omni_grpc.types.request import Request

FAIR_SHARE = 1.25
"""How long a shared step may be, where no limit is set: so many times what its jobs would take in turns if each took
as long as the one whose turn it is. Equal jobs always share; a small job waits for no big one in its own step.
"""


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
    `final`: it is not requeued when its worker is lost.
    """

    request: Request
    rank: float
    arrival: int
    tenant: str = ""
    phase: Phase = Phase.WAITING
    rows: tuple[int, ...] = ()
    service: float = 0.0
    preempted: bool = False
    part_ready: bool = False
    final: bool = False

    @property
    def order(self) -> tuple[float, int]:
        return (self.rank, self.arrival)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and the jobs that it preempts or resumes. `services` of the jobs that take the step, and `clock`: what
    they were before it was charged for.
    """

    plan: Plan
    preempted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    services: tuple[float, ...] = ()
    clock: float = 0.0


class Scheduler:
    """Every job it holds is in exactly one phase.

    At most `max_num_seqs` jobs share a step, and no job joins one that it would make longer than `max_step_ms` or, if
    that is None, than FAIR_SHARE allows; a job that is longer than that alone takes its steps alone. The states of
    preempted jobs stay in the worker, so at most 2 * max_num_seqs jobs are prepared or running at any time.
    """

    def __init__(
        self, max_queue: int, max_num_seqs: int, *, policy: str = "fcfs", max_step_ms: float | None = None
    ) -> None:
        self.max_queue = max_queue
        self.max_num_seqs = max_num_seqs
        self.max_step_ms = max_step_ms
        self.cost = CostModel()
        self.exclusive = False
        """One job at a time, from its prepare to the end of its decode."""
        self._rank = POLICIES[policy]
        self._items: dict[str, Item] = {}
        self._arrivals = itertools.count()
        self._clock = 0.0
        self._busy: set[Lane] = set()
        self._dropped: list[str] = []

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._items

    @property
    def waiting(self) -> int:
        return len(self._in(Phase.WAITING))

    @property
    def active(self) -> int:
        """The number of jobs that have left the queue and are not finished."""
        return len(self._items) - self.waiting

    @property
    def tenants(self) -> list[str]:
        """Those that have jobs here, in the order of their oldest one."""
        return list(dict.fromkeys(item.tenant for item in self._items.values()))

    def queued_of(self, tenant: str) -> int:
        """The number of a tenant's jobs in the queue."""
        return sum(item.tenant == tenant for item in self._in(Phase.WAITING))

    def running_of(self, tenant: str) -> int:
        """The number of a tenant's jobs that have left the queue and are not finished."""
        return sum(item.tenant == tenant for item in self._items.values()) - self.queued_of(tenant)

    def busy(self, lane: Lane) -> bool:
        return lane in self._busy

    def position(self, job_id: str) -> int:
        """The number of jobs that leave the queue before this one; 0 for a job that has left it."""
        item = self._items.get(job_id)
        if item is None or item.phase is not Phase.WAITING:
            return 0
        return sum(other.order < item.order for other in self._in(Phase.WAITING))

    def phase(self, job_id: str) -> Phase:
        return self._items[job_id].phase

    def check_room(self) -> None:
        """Raises ResourceExhausted (QUEUE_FULL) where there is no room in the queue."""
        if self.waiting >= self.max_queue:
            raise ResourceExhausted(
                f"the queue is full: {self.max_queue} jobs are waiting (--max-queue); retry later",
                reason="QUEUE_FULL",
                retry_after=1.0,
            )

    def add(self, request: Request, claim: Claim = Claim(), tenant: str = "") -> None:  # noqa: B008 - frozen
        """Puts a job in the queue. Raises like `check_room`."""
        self.check_room()
        self._items[request.id] = Item(request, self._rank(claim), next(self._arrivals), tenant)

    def plan(self) -> Decision:
        """Work for every free lane. The lanes that it fills are busy until `free`."""
        clock, admit = self._clock, self._admit() if Lane.PREPARE not in self._busy else ()
        taken, preempted = self._step() if Lane.STEP not in self._busy else ([], [])
        services = tuple(item.service for item in taken)
        self._charge(taken)
        resumed = [item for item in taken if item.preempted]
        for item in resumed + preempted:
            item.preempted = not item.preempted
        decode_parts, decode = self._decode() if Lane.DECODE not in self._busy else ((), ())
        dropped, self._dropped = tuple(self._dropped), []
        plan = Plan(admit=admit, step=_ids(taken), decode_parts=decode_parts, decode=decode, drop=dropped)
        return Decision(plan, _ids(preempted), _ids(resumed), services, clock)

    def undo(self, decision: Decision) -> None:
        """The newest plan did not reach the worker, so it never was: the jobs that it admitted return to their place in
        the queue, nobody has paid for its step, and nobody was preempted by it.
        """
        plan = decision.plan
        for job_id in decision.preempted + decision.resumed:
            self._items[job_id].preempted = job_id in decision.resumed
        for job_id, service in zip(plan.step, decision.services, strict=True):
            self._items[job_id].service = service
        self._clock = decision.clock
        for request in plan.admit:
            self._items[request.id].phase = Phase.WAITING
        for job_id in plan.decode:
            self._items[job_id].phase = Phase.DECODE_QUEUED
        for job_id in plan.decode_parts:
            self._items[job_id].part_ready = True
        self._dropped[:0] = plan.drop
        for lane in lanes(plan):
            self._busy.remove(lane)

    def free(self, lane: Lane) -> None:
        """The worker reported, so its lane can take more work."""
        self._busy.remove(lane)

    def prepared(self, job_id: str, rows: tuple[int, ...]) -> None:
        """A job can take steps; `rows` are the tokens of each of its rows. Ignored for a removed job."""
        if (item := self._items.get(job_id)) is not None:
            item.phase, item.rows, item.service = Phase.RUNNING, rows, self._clock

    def denoised(self, job_id: str) -> None:
        """A job has taken its last step. Ignored for a removed job."""
        if (item := self._items.get(job_id)) is not None:
            item.phase = Phase.DECODE_QUEUED

    def part_ready(self, job_id: str) -> None:
        """Part of a job's output can be decoded while the job goes on. Ignored for a removed job."""
        if (item := self._items.get(job_id)) is not None:
            item.part_ready = True

    def finish(self, job_id: str) -> None:
        """A job is over in the worker too: it ended, or it failed and its state was dropped there."""
        self._items.pop(job_id, None)

    def remove(self, job_id: str) -> Phase:
        """Removes a job and returns its phase. The next plan tells the worker to drop the job's state."""
        phase = self._items.pop(job_id).phase
        if phase is not Phase.WAITING:
            self._dropped.append(job_id)
        return phase

    def reset(self) -> tuple[list[str], list[str]]:
        """The worker is gone, so all lanes are free. Returns the jobs that it held, which are removed, and those that
        it had not prepared yet: they have lost nothing, and return to their place in the queue.

        A job is requeued once. If a second worker is lost while it prepares the same job, the job may well be the
        cause.
        """
        back = [item for item in self._in(Phase.PREPARING) if not item.final]
        for item in back:
            item.phase, item.final = Phase.WAITING, True
        lost = [job_id for job_id, item in self._items.items() if item.phase is not Phase.WAITING]
        for job_id in lost:
            del self._items[job_id]
        self._busy.clear()
        self._dropped.clear()
        return lost, list(_ids(back))

    def blame(self) -> None:
        """The worker hangs in its prepare lane and will be killed: the jobs in that lane will not be requeued."""
        for item in self._in(Phase.PREPARING):
            item.final = True

    def predicted_ms(self, job_ids: Iterable[str]) -> float:
        """The milliseconds that the cost model predicts for a step of these jobs; 0 for none."""
        rows = [tokens for job_id in job_ids for tokens in self._items[job_id].rows]
        return self.cost.step_ms(rows) if rows else 0.0

    def _admit(self) -> tuple[Request, ...]:
        """The first job in the queue, if there is room for it or it outranks a running job."""
        queue = self._in(Phase.WAITING)
        if not queue:
            return ()
        first = min(queue, key=lambda item: item.order)
        if self.exclusive and self.active:
            return ()
        inside = self._in(Phase.PREPARING, Phase.RUNNING)
        ahead = [item for item in inside if item.rank <= first.rank]
        if len(ahead) >= self.max_num_seqs or len(inside) >= 2 * self.max_num_seqs:
            return ()
        first.phase = Phase.PREPARING
        self._busy.add(Lane.PREPARE)
        return (first.request,)

    def _step(self) -> tuple[list[Item], list[Item]]:
        """The jobs of the next step, and those that are preempted by it."""
        running = sorted(self._in(Phase.RUNNING), key=self._turn)
        if not running:
            return [], []
        chosen: list[Item] = []
        for item in running:
            if len(chosen) < self.max_num_seqs and (not chosen or self._fits([*chosen, item])):
                chosen.append(item)
        best = chosen[0].rank
        preempted = [item for item in running if item not in chosen and item.rank > best and not item.preempted]
        self._busy.add(Lane.STEP)
        # in order of arrival, so that the batch stays the same from step to step and its packed constants can be kept
        return sorted(chosen, key=lambda item: item.arrival), preempted

    def _turn(self, item: Item) -> tuple[float, float, int]:
        return (item.rank, item.service + self.cost.step_ms(item.rows), item.arrival)

    def _charge(self, chosen: list[Item]) -> None:
        """Divides the time of a step among those who take it. The clock is what a job would have by now that had always
        received its fair share: a new job starts there, so that it owes nothing and is owed nothing.
        """
        if not chosen:
            return
        total = self.predicted_ms(item.request.id for item in chosen)
        alone = [self.cost.step_ms(item.rows) for item in chosen]
        for item, own in zip(chosen, alone, strict=True):
            item.service += total * own / sum(alone)
        self._clock += total / len(self._in(Phase.RUNNING))

    def _fits(self, items: list[Item]) -> bool:
        """Whether these may share a step; the first is the one whose turn it is."""
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
        first = min(queue, key=lambda item: item.order)
        self._busy.add(Lane.DECODE)
        if first.phase is Phase.RUNNING:
            first.part_ready = False
            return (first.request.id,), ()
        first.phase = Phase.DECODING
        return (), (first.request.id,)

    def _in(self, *phases: Phase) -> list[Item]:
        return [item for item in self._items.values() if item.phase in phases]


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """The lanes that a plan fills."""
    work = {Lane.PREPARE: plan.admit, Lane.STEP: plan.step, Lane.DECODE: plan.decode_parts or plan.decode}
    return tuple(lane for lane, ids in work.items() if ids)


def _ids(items: Iterable[Item]) -> tuple[str, ...]:
    return tuple(item.request.id for item in items)
