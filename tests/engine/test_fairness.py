"""Tenants that share a device: who gets how much of it, and when. Simulated worker, real scheduler."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from omni_grpc.engine.fairness import Share, Turns
from omni_grpc.engine.items import Lane, Phase
from omni_grpc.engine.policy import POLICIES, Claim
from omni_grpc.types.plan import CostModel
from tests.engine.simulation import COST, Simulation
from tests.engine.test_scheduler import Worker, request


def overload(sim, tenants, size, until, backlog=20):
    """Each tenant has always that many jobs; returns the part of the time that each received."""

    def more(tenant):
        tokens, steps = size(tenant)
        sim.add(tenant, tokens, steps)

    for tenant in tenants:
        for _ in range(backlog):
            more(tenant)
    sim.on_end = lambda work: more(work.tenant)
    sim.run(until)
    return {tenant: sim.served[tenant] / sum(sim.served.values()) for tenant in tenants}


OPTIONS = [{}, {"places": 1}, {"places": 2}, {"max_step_ms": 60.0}, {"max_step_ms": 1e9}, {"policy": "priority"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_three_to_one_is_three_to_one_under_overload_with_random_sizes(options, seed):
    draw = random.Random(seed)
    sim = Simulation(shares=[("a", 3.0), ("b", 1.0)], **options)
    parts = overload(sim, "ab", lambda _: (draw.randint(50, 400), draw.randint(2, 30)), 40_000)
    assert parts["a"] == pytest.approx(0.75, rel=0.05)
    assert parts["b"] == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("places", [4, 8, 32])
def test_twelve_tenants_receive_by_weight_whatever_the_places(places):
    draw = random.Random(2)
    weights = {f"t{i:02}": float(i + 1) for i in range(12)}
    sim = Simulation(shares=weights.items(), places=places)
    parts = overload(sim, weights, lambda _: (draw.randint(50, 300), draw.randint(2, 20)), 80_000, backlog=8)
    for tenant, part in parts.items():
        assert part == pytest.approx(weights[tenant] / sum(weights.values()), rel=0.05), tenant


@pytest.mark.parametrize("options", [{}, {"max_step_ms": 60.0}, {"max_step_ms": 1e9}], ids=str)
def test_jobs_fifty_times_as_large_buy_no_more_time(options):
    sim = Simulation(shares=[("large", 1.0), ("small", 1.0)], **options)
    parts = overload(sim, ("large", "small"), lambda tenant: (5000 if tenant == "large" else 100, 20), 200_000)
    assert parts["large"] == pytest.approx(0.5, rel=0.05)


def test_fifty_jobs_buy_no_more_time_than_one():
    sim = Simulation()
    sim.add("one", 100, 100_000)
    for _ in range(50):
        sim.add("many", 100, 100_000)
    sim.run(60_000)
    assert sim.served["one"] / sum(sim.served.values()) == pytest.approx(0.5, rel=0.05)


def test_where_a_step_costs_the_same_whoever_is_in_it_jobs_of_others_nearly_always_join():
    """The fixed part is paid by the tenants that are there, so a full batch beside one job stays the rule."""
    sim = Simulation(cost=CostModel(fixed=500.0, token=0.01))
    one = sim.add("one", 100, 100_000)
    many = [sim.add("many", 100, 100_000) for _ in range(7)]
    sim.run(500_000)
    assert min(work.taken for work in many) > 0.9 * one.taken


def test_a_thousand_queued_jobs_do_not_hold_up_the_first_job_of_another_tenant():
    sim = Simulation()
    for _ in range(1000):
        sim.add("busy", 400, 1000)
    sim.run(50_000)
    assert len(sim.running("busy")) == 8, "alone, it has every place"
    first = sim.add("other", 400, 10)
    assert sim.scheduler.position(first.id) == 0
    began = sim.now
    sim.run(stop=lambda: first.ended is not None)
    # 41 ms a step, of which it takes ten in half of the time, and 330 ms for a step of the others before and after
    assert first.left - began <= 330, "it waits for the step in flight at most, not for a place"
    assert first.ended - began <= 10 * 41 * 2 + 2 * 330


def test_a_tenant_that_is_ahead_keeps_its_place_and_waits_for_its_turn_there():
    """Its part of the time is used up, its part of the places is not: who is before it in line has more than that."""
    sim = Simulation(places=2, shares=[("light", 0.01)])
    sim.add("light", 1000, 1)
    for _ in range(20):
        sim.add("busy", 100, 200)
    sim.run(stop=lambda: any(work.ended for work in sim.jobs.values()))
    again, began = sim.add("light", 1000, 1), sim.now
    assert sim.scheduler.position(again.id) == 0
    sim.run(stop=lambda: again.ended is not None)
    assert again.left - began <= 22, "the step in flight"
    assert again.ended - began >= 4000, (
        "its first step was 101 ms at a hundredth of the weight; others have theirs first"
    )


def test_who_was_away_has_no_credit_and_who_was_alone_has_no_debt():
    sim = Simulation()
    endless = [sim.add("alone", 100, 1_000_000) for _ in range(4)]
    sim.run(100_000)
    sim.served.clear()
    back = [sim.add("back", 100, 1_000_000) for _ in range(4)]
    sim.run(sim.now + 20_000)
    assert sim.served["back"] == pytest.approx(sim.served["alone"], rel=0.05)
    for work in (*endless, *back):
        sim.scheduler.remove(work.id)
    sim.run(sim.now + 1000)
    sim.served.clear()
    for tenant in ("alone", "back"):
        sim.add(tenant, 100, 1_000_000)
    sim.run(sim.now + 5_000)
    assert sim.served["back"] == pytest.approx(sim.served["alone"], rel=0.05)


def test_going_away_after_each_job_gains_nothing():
    """Its jobs are fifty times as large as the other's and take one step: a fresh start each time would be worth most
    of the device.
    """
    sim = Simulation()
    sim.add("steady", 100, 1_000_000)
    sim.on_end = lambda work: sim.add("hopper", 5000, 1)
    sim.add("hopper", 5000, 1)
    sim.run(300_000)
    assert sim.served["hopper"] / sum(sim.served.values()) <= 0.55


def test_rank_goes_first_between_tenants_too():
    sim = Simulation(policy="priority", places=1, shares=[("light", 0.01), ("heavy", 100.0)])
    for _ in range(5):
        sim.add("heavy", 100, 50)
    sim.run(300)
    urgent = sim.add("light", 100, 50, rank=5)
    began = sim.now
    sim.run(stop=lambda: urgent.ended is not None)
    assert urgent.ended - began <= 52 * 11 + 1


def test_max_running_keeps_jobs_back_and_nobody_else():
    sim = Simulation(shares=[("limited", Share(max_running=2))])
    for _ in range(6):
        sim.add("limited", 100, 200)
    others = [sim.add("free", 100, 200) for _ in range(3)]
    waiting = [work.id for work in sim.waiting("limited")]
    assert [sim.scheduler.position(job_id) for job_id in waiting] == [0, 2, 5, 6, 7, 8]
    sim.run(10)
    assert (len(sim.running("limited")), len(sim.running("free"))) == (2, 3)
    seen = []
    sim.on_end = lambda work: seen.append(len(sim.running("limited")))
    sim.run(100_000)
    assert max(seen) <= 2
    assert all(work.ended for work in (*others, *sim.jobs.values()))


def test_shares_may_change_while_jobs_run():
    sim = Simulation(shares=[("a", Share(max_running=1))])
    for _ in range(4):
        sim.add("a", 100, 10_000)
    sim.run(50)
    assert len(sim.running("a")) == 1
    sim.shares["a"] = Share(max_running=3)
    sim.run(sim.now + 50)
    assert len(sim.running("a")) == 3
    sim.add("b", 100, 10_000)
    sim.shares["b"] = Share(weight=4.0)
    sim.run(sim.now + 50)
    sim.served.clear()
    sim.run(sim.now + 20_000)
    assert sim.served["b"] / sim.served["a"] == pytest.approx(4.0, rel=0.05)


def test_decodes_are_shared_too():
    """Decoding is the bottleneck: another tenant's first output does not wait for all those that came before it."""
    sim = Simulation(decode_ms=5000)
    for _ in range(60):
        sim.add("busy", 10, 1)
    sim.run(20_000)
    first = sim.add("other", 10, 1)
    began = sim.now
    sim.run(stop=lambda: first.ended is not None)
    assert first.ended - began <= 3 * 5000, "for the one that runs and the one whose turn it was"


@pytest.mark.parametrize(
    "values", [{"weight": 0.0}, {"weight": -1.0}, {"weight": math.inf}, {"weight": math.nan}, {"max_running": 0}]
)
def test_a_share_that_cannot_be_is_refused_by_its_name(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Share(**values)


def test_turns_start_where_the_others_are():
    turns = Turns().follow({"a"}).charge("a", 100.0).follow({"a", "b"})
    assert turns["b"] == 100.0
    turns = turns.charge("b", 50.0).follow({"a"}).charge("a", 10.0).follow({"a", "b", "c"})
    assert (turns["b"], turns["c"]) == (150.0, 110.0), "b is still ahead by what it received then"
    turns = turns.follow(set()).follow({"a", "b", "d"})
    assert turns["a"] == turns["b"] == turns["d"], "nobody owes anything once nobody was left"


def test_a_plan_that_is_taken_back_costs_no_tenant_its_turn():
    """The tenants take turns whatever number of plans did not get through."""

    def steps(losses):
        sim = Simulation(places=1)
        scheduler = sim.scheduler
        for tenant in ("a", "b"):
            sim.add(tenant, 100, 10)
            scheduler.plan()
            scheduler.free(Lane.PREPARE)
            scheduler.prepared(list(sim.jobs)[-1], (100,))
            if scheduler.busy(Lane.STEP):
                scheduler.free(Lane.STEP)
        taken = []
        for _ in range(8):
            for _ in range(losses):
                scheduler.undo(scheduler.plan())
            taken += scheduler.plan().plan.step
            scheduler.free(Lane.STEP)
        return taken

    assert steps(0) == steps(1) == steps(3)
    assert sorted(set(steps(0)[:2])) == sorted(set(steps(0))), "they take turns"


NAMES = "abcd"


@st.composite
def workloads(draw):
    """Shares, and jobs with the time that passes before each comes."""
    limit = st.sampled_from([None, None, 1, 2])
    shares = {t: Share(weight=draw(st.sampled_from([0.1, 1.0, 3.0])), max_running=draw(limit)) for t in NAMES}
    job = st.tuples(
        st.sampled_from([0.0, 0.0, 0.0, 5.0, 100.0, 2000.0]),
        st.sampled_from(NAMES),
        st.sampled_from([10, 100, 500]),
        st.integers(1, 12),
        st.integers(-1, 1),
    )
    return shares, draw(st.lists(job, min_size=1, max_size=40))


@settings(max_examples=60, deadline=None)
@given(workloads(), st.integers(1, 4), st.sampled_from(["fcfs", "priority"]), st.sampled_from([None, 30.0]))
def test_whoever_comes_and_goes_no_lane_idles_no_limit_breaks_and_every_job_ends(workload, places, policy, max_step_ms):
    shares, jobs = workload
    sim = Simulation(shares=shares.items(), places=places, policy=policy, max_step_ms=max_step_ms)
    plan, scheduler = sim.scheduler.plan, sim.scheduler

    def checked():
        first = [work.id for work in sim.jobs.values() if work.left is None and scheduler.position(work.id) == 0]
        decision = plan()
        assert len(first) <= 1
        assert [request.id for request in decision.plan.admit] in ([], first), "who leaves was said to be first"
        phases = {work: scheduler.phase(work.id) for work in sim.jobs.values() if work.id in scheduler}
        running = [work for work, phase in phases.items() if phase is not Phase.WAITING]
        inside = sum(phase in (Phase.PREPARING, Phase.RUNNING) for phase in phases.values())
        assert inside <= 2 * places
        for tenant, share in shares.items():
            if share.max_running is not None:
                assert sum(work.tenant == tenant for work in running) <= share.max_running
        if Phase.RUNNING in phases.values():
            assert scheduler.busy(Lane.STEP)
        if Phase.DECODE_QUEUED in phases.values():
            assert scheduler.busy(Lane.DECODE)
        able = [
            work
            for work, phase in phases.items()
            if phase is Phase.WAITING
            and sum(one.tenant == work.tenant for one in running) < (shares[work.tenant].max_running or 1000)
        ]
        if able and inside < places:
            assert scheduler.busy(Lane.PREPARE), "there is a place, and somebody who may have it"
        return decision

    scheduler.plan = checked
    for pause, tenant, tokens, steps, rank in jobs:
        if pause:
            sim.run(sim.now + pause)
            sim.now += pause if not sim.jobs else 0.0
        sim.add(tenant, tokens, steps, rank=rank)
    sim.run()
    assert all(work.ended is not None for work in sim.jobs.values())
    total = sum(COST.step_ms((work.tokens,)) * work.steps for work in sim.jobs.values())
    assert sum(sim.served.values()) <= total + 1e-6


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([10, 100, 1000]), st.sampled_from([0.25, 1.0, 2.0])), min_size=2, max_size=4),
    st.integers(1, 4),
)
def test_tenants_that_have_work_all_the_time_are_never_further_apart_than_a_few_steps(tenants, jobs):
    """In any span, not only in the long run."""
    sim = Simulation(places=16, shares=[(str(i), weight) for i, (_, weight) in enumerate(tenants)])
    for i, (tokens, _) in enumerate(tenants):
        for _ in range(jobs):
            sim.add(str(i), tokens, 1_000_000)
    sim.run(20.0)
    longest = max(jobs * COST.step_ms((tokens,)) / weight for tokens, weight in tenants)
    for _ in range(5):
        sim.paid.clear()
        sim.run(sim.now + 1000.0)
        got = [sim.paid[str(i)] / weight for i, (_, weight) in enumerate(tenants)]
        assert max(got) - min(got) <= 3 * longest


class Tenants(Worker):
    """What holds for one tenant whatever the worker and its users do holds for several, as their shares change."""

    @initialize(
        max_queue=st.integers(1, 5),
        max_num_seqs=st.integers(1, 3),
        policy=st.sampled_from(sorted(POLICIES)),
        max_step_ms=st.sampled_from([None, 50.0]),
    )
    def begin(self, max_queue, max_num_seqs, policy, max_step_ms):
        super().begin(max_queue, max_num_seqs, policy, max_step_ms)
        self.shares = {}
        self.scheduler.share_of = lambda tenant: self.shares.get(tenant, Share())

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(-1, 1), deadline=st.sampled_from([1.0, math.inf]))
    def add(self, tenant, priority, deadline):
        if self.scheduler.waiting < self.scheduler.max_queue:
            self.scheduler.add(request(str(self.count)), Claim(priority=priority, deadline=deadline), tenant)
            self.added.add(str(self.count))
            self.count += 1

    @rule(
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from([0.01, 1.0, 50.0]),
        max_running=st.sampled_from([None, 1, 2]),
    )
    def share(self, tenant, weight, max_running):
        self.shares[tenant] = Share(weight=weight, max_running=max_running)

    @rule()
    def places(self):
        waiting = [name for name in self.added if name in self.scheduler]
        waiting = [name for name in waiting if self.scheduler.phase(name) is Phase.WAITING]
        assert sorted(map(self.scheduler.position, waiting)) == list(range(len(waiting)))


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
