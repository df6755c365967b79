import copy
import dataclasses
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_grpc.config import LimitsConfig
from omni_grpc.engine.fairness import Share
from omni_grpc.engine.policy import POLICIES, Claim
from omni_grpc.engine.scheduler import Lane, Phase, Scheduler
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.plan import CostModel
from omni_grpc.types.request import Draft
from tests.toy import toy_checkpoint


def request(name):
    return resolve_request(
        Draft(model="toy", prompt="x"), ServingFacts(toy_checkpoint(), LimitsConfig()), id=name
    ).request


COST = CostModel(fixed=1.0, token=0.1, pair=0.0)


def test_the_queue_is_first_come_first_served_and_bounded():
    scheduler = Scheduler(max_queue=2, max_num_seqs=1)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(ResourceExhausted):
        scheduler.add(request("c"))
    assert [scheduler.position(name) for name in "ab"] == [0, 1]
    assert scheduler.plan().plan.admit[0].id == "a"
    scheduler.add(request("c"))
    assert (scheduler.waiting, scheduler.active) == (2, 1)


@pytest.mark.parametrize("max_running", [None, 2])
def test_the_place_in_the_queue_is_that_of_the_order_in_which_jobs_leave(max_running):
    chance = random.Random(7)
    scheduler = Scheduler(max_queue=1000, max_num_seqs=3, policy="priority")
    scheduler.share_of = lambda tenant: Share(max_running=max_running)
    for number in range(60):
        scheduler.add(request(f"{number}"), Claim(priority=chance.randrange(3)), "one")
        if chance.random() < 0.3 and not scheduler.busy(Lane.PREPARE):
            scheduler.plan()
        if chance.random() < 0.2:
            scheduler.remove(chance.choice([name for name in map(str, range(number + 1)) if name in scheduler]))
        order = [item.request.id for item in scheduler.books.leaving()]
        assert [scheduler.position(name) for name in order] == list(range(len(order)))
    scheduler.add(request("other"), Claim(), "two")
    order = [item.request.id for item in scheduler.books.leaving()]
    assert [scheduler.position(name) for name in order] == list(range(len(order)))
    assert scheduler.waiting == len(order) > 30


def running(policy="fcfs", max_num_seqs=8, max_step_ms=None, **jobs):
    """A scheduler whose jobs are all prepared: name -> (claim, tokens of its only row)."""
    scheduler = Scheduler(100, max_num_seqs, policy=policy, max_step_ms=max_step_ms)
    scheduler.cost = COST
    for name, (claim, tokens) in jobs.items():
        enter(scheduler, name, tokens, claim)
    return scheduler


def enter(scheduler, name, tokens, claim=None):
    scheduler.add(request(name), claim or Claim())
    assert [r.id for r in scheduler.plan().plan.admit] == [name]
    scheduler.free(Lane.PREPARE)
    scheduler.prepared(name, (tokens,))
    if scheduler.busy(Lane.STEP):
        scheduler.free(Lane.STEP)


def next_step(scheduler):
    decision = scheduler.plan()
    scheduler.free(Lane.STEP)
    return decision


def steps(scheduler, count):
    return [next_step(scheduler).plan.step for _ in range(count)]


def test_jobs_that_fit_share_every_step():
    scheduler = running(max_step_ms=1000, a=(Claim(), 100), b=(Claim(), 200))
    assert steps(scheduler, 3) == [("a", "b")] * 3


def test_a_job_longer_than_the_limit_takes_turns_with_the_small_ones():
    # big is 201 ms, each small one 11 ms, and a step may take 50 ms
    scheduler = running(max_step_ms=50, big=(Claim(), 2000), s1=(Claim(), 100), s2=(Claim(), 100))
    taken = steps(scheduler, 400)
    assert all(step == ("big",) or set(step) <= {"s1", "s2"} for step in taken)
    served = {name: sum(name in step for step in taken) for name in ("big", "s1", "s2")}
    # equal service: 201 ms to the big one for 201 ms to each small one, which is half of a step of 21 ms
    assert served["s1"] == served["s2"]
    assert served["s1"] / served["big"] == pytest.approx(201 / 10.5, rel=0.1)


def test_without_a_limit_jobs_of_similar_size_share_every_step():
    # 11 ms alone, 16 ms alone: 26 ms together are less than 1.25 times two turns of 11 ms
    scheduler = running(a=(Claim(), 100), b=(Claim(), 150), c=(Claim(), 100))
    assert steps(scheduler, 3) == [("a", "b", "c")] * 3


def test_without_a_limit_a_small_job_waits_for_one_step_of_a_big_one_and_no_more():
    # big is 201 ms, the small one 11 ms: in shared steps its 18 would take 18 * 211 ms
    scheduler = running(big=(Claim(), 2000))
    steps(scheduler, 5)
    enter(scheduler, "small", 100)
    assert steps(scheduler, 18) == [("small",)] * 18, "it is worth a step of the big one, and goes first"
    assert "big" in next_step(scheduler).plan.step


def test_without_a_limit_a_small_job_rides_along_with_a_big_one():
    scheduler = running(big=(Claim(), 2000), small=(Claim(), 100))
    taken = steps(scheduler, 400)
    assert set(taken) == {("small",), ("big", "small")}
    big = sum("big" in step for step in taken)
    # half of the time is the big one's, but for what the small one takes of its steps
    assert big * 201 == pytest.approx(sum(211 if "big" in step else 11 for step in taken) / 2, rel=0.1)


@pytest.mark.parametrize("max_step_ms", [None, 50])
def test_a_stream_of_small_jobs_does_not_starve_a_big_one(max_step_ms):
    scheduler = running(max_num_seqs=4, max_step_ms=max_step_ms, big=(Claim(), 2000))
    turns = []
    for count in range(200):  # a small job comes before each step and ends after its first
        scheduler.add(request(f"s{count}"))
        plan = scheduler.plan().plan
        turns.append("big" in plan.step)
        scheduler.free(Lane.STEP)
        for small in set(plan.step) - {"big"}:
            scheduler.denoised(small)
            scheduler.finish(small)
        for admitted in plan.admit:
            scheduler.free(Lane.PREPARE)
            scheduler.prepared(admitted.id, (100,))
    # a step of the big one is worth about 18 small ones
    assert 6 <= sum(turns) <= 40
    assert any(turns[-50:])


def test_a_big_job_does_not_starve_small_ones():
    scheduler = running(max_step_ms=50, b1=(Claim(), 2000), b2=(Claim(), 2000))
    steps(scheduler, 10)
    enter(scheduler, "small", 100)
    assert sum("small" in step for step in steps(scheduler, 30)) >= 20


def test_a_job_of_higher_priority_preempts_and_the_other_comes_back():
    scheduler = running("priority", max_num_seqs=1, low=(Claim(), 10))
    assert next_step(scheduler).plan.step == ("low",)
    scheduler.add(request("high"), Claim(priority=5))
    decision = scheduler.plan()
    assert [r.id for r in decision.plan.admit] == ["high"], "it is prepared although the only place is taken"
    assert decision.plan.step == ("low",), "and the other goes on meanwhile"
    scheduler.free(Lane.PREPARE)
    scheduler.free(Lane.STEP)
    scheduler.prepared("high", (10,))
    decision = next_step(scheduler)
    assert (decision.plan.step, decision.preempted, decision.resumed) == (("high",), ("low",), ())
    decision = next_step(scheduler)
    assert (decision.plan.step, decision.preempted) == (("high",), ()), "said once"
    scheduler.denoised("high")
    decision = next_step(scheduler)
    assert (decision.plan.step, decision.resumed) == (("low",), ("low",))


def test_equal_priority_does_not_preempt():
    scheduler = running("priority", max_num_seqs=1, first=(Claim(priority=1), 10))
    scheduler.add(request("second"), Claim(priority=1))
    assert scheduler.plan().plan.admit == ()


def test_prepared_jobs_are_bounded_whatever_outranks_whom():
    scheduler = Scheduler(100, 2, policy="priority")
    scheduler.cost = COST
    for i in range(4):
        enter(scheduler, f"j{i}", 10, Claim(priority=i))
    scheduler.add(request("urgent"), Claim(priority=99))
    assert scheduler.plan().plan.admit == ()


def test_the_earliest_deadline_goes_first():
    scheduler = Scheduler(100, 1, policy="deadline")
    for name, deadline in (("none", math.inf), ("late", 200.0), ("soon", 100.0)):
        scheduler.add(request(name), Claim(deadline=deadline))
    assert [scheduler.position(name) for name in ("soon", "late", "none")] == [0, 1, 2]
    assert scheduler.plan().plan.admit[0].id == "soon"


def test_a_dead_worker_loses_what_it_held_and_nothing_that_waits():
    scheduler = running(max_num_seqs=2, a=(Claim(), 10), b=(Claim(), 10))
    scheduler.add(request("c"))
    scheduler.plan()
    assert scheduler.reset() == (["a", "b"], [])
    assert "c" in scheduler
    assert scheduler.plan().plan.admit[0].id == "c"


def test_a_job_that_was_not_prepared_goes_back_to_its_place_once():
    scheduler = running(a=(Claim(), 10))
    for name in "bc":
        scheduler.add(request(name))
    assert scheduler.plan().plan.admit[0].id == "b"
    assert scheduler.reset() == (["a"], ["b"])
    assert [scheduler.position(name) for name in "bc"] == [0, 1]
    assert scheduler.plan().plan.admit[0].id == "b", "the lane is free, and it is first as before"
    assert scheduler.reset() == (["b"], []), "it may be what kills the workers"
    assert scheduler.plan().plan.admit[0].id == "c"


def test_a_job_that_is_cancelled_in_prepare_does_not_come_back():
    scheduler = Scheduler(max_queue=2, max_num_seqs=1)
    scheduler.add(request("a"))
    scheduler.plan()
    scheduler.remove("a")
    assert scheduler.reset() == ([], [])
    assert not scheduler.plan().plan


def test_a_job_that_the_worker_hangs_at_does_not_go_back():
    scheduler = Scheduler(max_queue=2, max_num_seqs=1)
    scheduler.add(request("a"))
    scheduler.plan()
    scheduler.blame()
    assert scheduler.reset() == (["a"], [])


class Worker(RuleBasedStateMachine):
    """Plays a worker and impatient users at random, and checks what must hold whatever they do."""

    @initialize(
        max_queue=st.integers(1, 3),
        max_num_seqs=st.integers(1, 3),
        policy=st.sampled_from(sorted(POLICIES)),
        max_step_ms=st.sampled_from([None, 0.0, 50.0, 1000.0]),
    )
    def begin(self, max_queue, max_num_seqs, policy, max_step_ms):
        self.scheduler = Scheduler(max_queue, max_num_seqs, policy=policy, max_step_ms=max_step_ms)
        self.scheduler.cost = COST
        self.count, self.added, self.gone = 0, set(), set()
        self.preparing, self.stepping, self.decoding = [], [], []
        self.known, self.aside, self.returned = set(), set(), set()
        self.parts, self.whole = set(), set()

    @rule(priority=st.integers(-1, 1), deadline=st.sampled_from([1.0, 2.0, math.inf]))
    def add(self, priority, deadline):
        name = str(self.count)
        claim = Claim(priority=priority, deadline=deadline)
        if self.scheduler.waiting >= self.scheduler.max_queue:
            with pytest.raises(ResourceExhausted):
                self.scheduler.add(request(name), claim)
            return
        self.count += 1
        self.scheduler.add(request(name), claim)
        self.added.add(name)

    @rule()
    def plan(self):
        decision = self.scheduler.plan()
        plan = decision.plan
        for lane, work in (
            (self.preparing, [r.id for r in plan.admit]),
            (self.stepping, list(plan.step)),
            (self.decoding, [*plan.decode, *plan.decode_parts]),
        ):
            assert not (lane and work), "a busy lane got more"
            lane.extend(work)
        assert len(plan.admit) <= 1
        assert len(plan.decode) + len(plan.decode_parts) <= 1
        work = {*(r.id for r in plan.admit), *plan.step, *plan.decode, *plan.decode_parts}
        assert not self.gone & work, "work for a job that is gone"
        assert self.parts >= set(plan.decode_parts), "a part that is not there, or once more"
        self.parts -= {*plan.decode_parts, *plan.decode}
        self.whole |= set(plan.decode)
        assert set(plan.drop) <= self.known
        self.known |= {r.id for r in plan.admit}
        assert len(plan.step) <= self.scheduler.max_num_seqs
        limit = self.scheduler.max_step_ms
        assert len(plan.step) <= 1 or limit is None or self.scheduler.predicted_ms(plan.step) <= limit
        assert set(decision.resumed) <= self.aside
        self.aside = (self.aside | set(decision.preempted)) - set(decision.resumed)
        assert not self.aside & set(plan.step), "a preempted job took a step without coming back"

    @rule()
    def plan_is_undone(self):
        """As where the worker does not get it: all is as before, so the next plan is the same."""
        before = self._state()
        decision = self.scheduler.plan()
        self.scheduler.undo(decision)
        assert self._state() == before
        again = self.scheduler.plan()
        self.scheduler.undo(again)
        assert again == decision
        assert self._state() == before

    def _state(self):
        """What a plan changes. Of the order in which jobs leave, not whether it has been asked for already."""
        scheduler, books = self.scheduler, self.scheduler.books
        both = vars(books) | vars(scheduler)
        plain = {name: value for name, value in both.items() if name not in ("_arrivals", "estimate", "books")}
        ranks = books.queue.ranks.items()
        queue = {rank: {name: [job.request.id for job in jobs] for name, jobs in of.items()} for rank, of in ranks}
        return copy.deepcopy(
            plain
            | {
                "items": [dataclasses.asdict(item) for item in books.items.values()],
                "active": list(books.active),
                "_active": list(scheduler._active),
                "_flying": {lane: [job.request.id for job in jobs] for lane, jobs in scheduler._flying.items()},
                "queue": (len(books.queue), queue),
                "_position": {name: scheduler.position(name) for name in books.items},
            }
        )

    @precondition(lambda self: self.preparing)
    @rule(breaks=st.booleans(), rows=st.lists(st.integers(1, 400), min_size=1, max_size=3))
    def prepared(self, breaks, rows):
        name = self.preparing.pop()
        self.scheduler.free(Lane.PREPARE)
        if breaks:
            self._finish(name)
        else:
            self.scheduler.prepared(name, tuple(rows))

    @precondition(lambda self: self.stepping)
    @rule(data=st.data())
    def stepped(self, data):
        self.scheduler.free(Lane.STEP)
        for name in self.stepping:
            match data.draw(st.sampled_from(["goes on", "part", "done"])):
                case "part":
                    self.scheduler.part_ready(name)
                    self.parts |= {name} - self.gone
                case "done":
                    self.scheduler.denoised(name)
        self.stepping.clear()

    @precondition(lambda self: self.decoding)
    @rule()
    def decoded(self):
        self.scheduler.free(Lane.DECODE)
        name = self.decoding.pop()
        if name in self.whole:
            self._finish(name)

    @precondition(lambda self: self.added - self.gone)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.added - self.gone)))
        self.scheduler.remove(name)
        self.gone.add(name)

    @rule()
    def die(self):
        lost, back = self.scheduler.reset()
        assert set(back) == set(self.preparing) - self.gone - self.returned
        assert set(lost) <= self.known - self.gone
        self.returned |= set(back)
        self.gone |= set(lost)
        for held in (self.preparing, self.stepping, self.decoding, self.known, self.aside):
            held.clear()

    def _finish(self, name):
        self.scheduler.finish(name)
        self.gone.add(name)

    @invariant()
    def limits_hold(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        phases = [scheduler.phase(name) for name in self.added if name in scheduler]
        inside = sum(phase in (Phase.PREPARING, Phase.RUNNING) for phase in phases)
        assert inside <= 2 * scheduler.max_num_seqs
        # a job that comes back finds a place where there is none for a new one
        assert scheduler.waiting == phases.count(Phase.WAITING) <= scheduler.max_queue + bool(self.returned)
        assert scheduler.waiting + scheduler.active == len(self.added - self.gone)
        assert all((name in scheduler) != (name in self.gone) for name in self.added)

    def teardown(self):
        """No lost wake-up: a patient worker brings every job that is left to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(50 * len(self.added) + 50):
            self.plan()
            if self.preparing:
                self.scheduler.free(Lane.PREPARE)
                self.scheduler.prepared(self.preparing.pop(), (10,))
            elif self.stepping:
                self.scheduler.free(Lane.STEP)
                for name in self.stepping:
                    self.scheduler.denoised(name)
                self.stepping.clear()
            elif self.decoding:
                self.decoded()
        assert self.added == self.gone


TestScheduler = Worker.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
