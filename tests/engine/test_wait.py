"""The wait that a caller is told of, against the wait that then happens."""

import dataclasses
import random
import statistics

import pytest

from omni_grpc.engine.fairness import Share
from omni_grpc.types.plan import CostModel
from tests.engine.manual import READY, ask, started_engine
from tests.engine.simulation import Simulation


def crowd(seed):
    """A server at some moment of a random history, and one of its tenants."""
    draw = random.Random(seed)
    names = "abcd"[: draw.randint(1, 4)]
    limits = [None, None, 1, 2]
    lanes = {"prepare_ms": draw.choice([0.1, 20.0]), "decode_ms": draw.choice([0.1, 20.0])}
    sim = Simulation(
        places=draw.choice([1, 2, 4, 8]),
        shares=[(t, Share(weight=draw.choice([0.2, 1.0, 3.0]), max_running=draw.choice(limits))) for t in names],
        policy=draw.choice(["fcfs", "fcfs", "priority"]),
        max_step_ms=draw.choice([None, None, 60.0, 1e9]),
        **lanes,
    )
    sim.scheduler.exclusive = draw.random() < 0.15
    ranks = draw.choice([[0], [0], [0, 0, 1]])
    for _ in range(draw.randint(1, 60)):
        sim.add(draw.choice(names), draw.choice([10, 100, 400, 1000]), draw.randint(1, 30), rank=draw.choice(ranks))
        if draw.random() < 0.3:
            sim.run(sim.now + draw.choice([1.0, 50.0, 500.0, 3000.0]))
    sim.run(sim.now + draw.choice([0.0, 10.0, 1000.0, 5000.0]))
    return sim, draw.choice(names), lanes


def promised_and_happened(seed):
    sim, tenant, lanes = crowd(seed)
    promised, began = sim.scheduler.expected_wait(tenant, **lanes), sim.now
    waiting, running = sim.waiting(tenant), sim.running(tenant)
    if waiting:
        sim.run(stop=lambda: any(work.left is not None for work in waiting))
    elif running:
        sim.run(stop=lambda: any(work.ended is not None for work in running))
    return promised, sim.now - began


@pytest.mark.parametrize("part", range(3))
def test_no_wait_is_longer_than_was_promised_nor_most_of_them_much_shorter(part):
    pairs = [promised_and_happened(seed) for seed in range(80 * part, 80 * part + 80)]
    late = {seed: pair for seed, pair in enumerate(pairs) if pair[1] > pair[0] + 1e-6}
    assert late == {}
    over = [promised / happened for promised, happened in pairs if happened > 1]
    assert len(over) > 40
    assert statistics.median(over) < 5


def test_who_has_no_job_waits_for_nothing_and_who_has_a_place_for_the_prepares_before_it():
    sim = Simulation(prepare_ms=20.0)
    assert sim.scheduler.expected_wait("a", prepare_ms=20.0) == 0.0
    for tenant in "ab":
        sim.add(tenant, 10, 5)
    assert [sim.scheduler.expected_wait(tenant, prepare_ms=20.0) for tenant in "ab"] == [0.0, 20.0]


async def test_an_engine_scales_its_promise_by_what_it_measured():
    engine, worker = await started_engine(max_num_seqs=1)
    worker.deliver(dataclasses.replace(READY, cost=CostModel(fixed=0.0, token=1.0)))
    assert engine.expected_wait("") == 0.0
    job, _ = ask(engine, steps=4), ask(engine, steps=4)
    worker.prepared(job.id, rows=(100,))
    exact = engine.expected_wait("")
    # four steps of 100 ms, and lanes of 0.1 s each for those that are there
    assert 0.4 <= exact <= 1.0
    worker.stepped({job.id: 1}, total=4)
    # it took 500 ms in place of 100, of which a tenth is believed: 1.4 times as long
    steps = 3 * 0.1
    assert engine.expected_wait("") == pytest.approx(exact - 4 * 0.1 + steps * 1.4, rel=0.01)


async def test_a_pipeline_without_a_cost_model_promises_by_the_steps_it_took():
    engine, worker = await started_engine(max_num_seqs=1)
    job, _ = ask(engine, steps=4), ask(engine, steps=4)
    worker.prepared(job.id, rows=())
    worker.stepped({job.id: 1}, total=4)
    assert engine.expected_wait("") >= 3 * 0.5
