import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_grpc.config import LimitsConfig
from omni_grpc.engine.scheduler import Lane, Phase, Scheduler
from omni_grpc.errors import ResourceExhausted
from omni_grpc.request import Draft
from omni_grpc.resolve import Facts, resolve_request
from tests.toy import toy_checkpoint


def request(name):
    return resolve_request(Draft(model="toy", prompt="x"), Facts(toy_checkpoint(), LimitsConfig()), id=name).request


def test_the_queue_is_first_come_first_served_and_bounded():
    scheduler = Scheduler(max_queue=2, max_num_seqs=1)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(ResourceExhausted):
        scheduler.add(request("c"))
    assert [scheduler.position(name) for name in "ab"] == [0, 1]
    assert scheduler.plan().admit[0].id == "a"
    scheduler.add(request("c"))
    assert (scheduler.waiting, scheduler.active) == (2, 1)


class Worker(RuleBasedStateMachine):
    """Plays a worker and impatient users at random, and checks what must hold whatever they do."""

    @initialize(max_queue=st.integers(1, 3), max_num_seqs=st.integers(1, 3))
    def begin(self, max_queue, max_num_seqs):
        self.scheduler = Scheduler(max_queue, max_num_seqs)
        self.count, self.added, self.gone = 0, set(), set()
        self.preparing, self.stepping, self.decoding = [], [], []
        self.known = set()

    @rule()
    def add(self):
        name = str(self.count)
        if self.scheduler.waiting >= self.scheduler.max_queue:
            with pytest.raises(ResourceExhausted):
                self.scheduler.add(request(name))
            return
        self.count += 1
        self.scheduler.add(request(name))
        self.added.add(name)

    @rule()
    def plan(self):
        plan = self.scheduler.plan()
        for lane, work in (
            (self.preparing, [r.id for r in plan.admit]),
            (self.stepping, list(plan.step)),
            (self.decoding, list(plan.decode)),
        ):
            assert not (lane and work), "a busy lane got more"
            lane.extend(work)
        assert len(plan.admit) <= 1
        assert len(plan.decode) <= 1
        assert not self.gone & {*(r.id for r in plan.admit), *plan.step, *plan.decode}, "work for a job that is gone"
        assert set(plan.drop) <= self.known
        self.known |= {r.id for r in plan.admit}

    @precondition(lambda self: self.preparing)
    @rule(breaks=st.booleans())
    def prepared(self, breaks):
        name = self.preparing.pop()
        self.scheduler.free(Lane.PREPARE)
        if breaks:
            self._finish(name)
        else:
            self.scheduler.move(name, Phase.RUNNING)

    @precondition(lambda self: self.stepping)
    @rule(data=st.data())
    def stepped(self, data):
        self.scheduler.free(Lane.STEP)
        for name in self.stepping:
            if data.draw(st.booleans()):
                self.scheduler.move(name, Phase.DECODE_QUEUED)
        self.stepping.clear()

    @precondition(lambda self: self.decoding)
    @rule()
    def decoded(self):
        self.scheduler.free(Lane.DECODE)
        self._finish(self.decoding.pop())

    @precondition(lambda self: self.added - self.gone)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.added - self.gone)))
        self.scheduler.remove(name)
        self.gone.add(name)

    def _finish(self, name):
        self.scheduler.finish(name)
        self.gone.add(name)

    @invariant()
    def limits_hold(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        phases = [scheduler.phase(name) for name in self.added if name in scheduler]
        assert sum(phase in (Phase.PREPARING, Phase.RUNNING) for phase in phases) <= scheduler.max_num_seqs
        assert scheduler.waiting == phases.count(Phase.WAITING) <= scheduler.max_queue
        assert scheduler.waiting + scheduler.active == len(self.added - self.gone)
        assert all((name in scheduler) != (name in self.gone) for name in self.added)

    def teardown(self):
        """No lost wake-up: a patient worker brings every job that is left to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20 * len(self.added) + 20):
            self.plan()
            if self.preparing:
                self.scheduler.free(Lane.PREPARE)
                self.scheduler.move(self.preparing.pop(), Phase.RUNNING)
            elif self.stepping:
                self.scheduler.free(Lane.STEP)
                for name in self.stepping:
                    self.scheduler.move(name, Phase.DECODE_QUEUED)
                self.stepping.clear()
            elif self.decoding:
                self.decoded()
        assert self.added == self.gone


TestScheduler = Worker.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
