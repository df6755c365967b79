"""What is predicted never exceeds the memory, and nobody waits for ever because of it."""

import dataclasses
import random

import pytest

from omni_grpc.engine.fairness import Share
from omni_grpc.engine.items import Item, Lane, Phase
from omni_grpc.engine.room import Room
from omni_grpc.types.memory_model import HeldLaw, MemoryModel, Need, PixelLaw, StepLaw
from tests.engine.simulation import BASE, PIXELS_A_TOKEN, Simulation

ROW = PixelLaw(area=1 / PIXELS_A_TOKEN)
ROUNDING = 1e-6


class Metered(Simulation):
    """Adds up, by itself, what all that is in the worker is predicted to take at each moment."""

    def __init__(self, memory, **options):
        super().__init__(**options)
        self.scheduler.memory = memory
        self.most = 0.0
        self.shared = 0
        self.plans = []
        self.more_rows = 0
        """Tokens that prepared rows have beyond what was predicted."""

    def need(self, work):
        item = self.scheduler.books.items.get(work.id)
        return self.scheduler.memory.need(item.request) if item is not None else self.gone[work.id]

    def add(self, *args, **values):
        work = super().add(*args, **values)
        self.gone = getattr(self, "gone", {})
        self.gone[work.id] = self.need(work)
        return work

    def plan(self):
        super().plan()
        lanes = {lane: [self.jobs[job_id] for job_id in ids] for _, _, lane, ids in self._reports}
        assert len(lanes) == len(self._reports), "a lane has two pieces of work"
        inside = {work for work in self.jobs.values() if work.left is not None and work.ended is None}
        inside |= {work for works in lanes.values() for work in works}
        model, step = self.scheduler.memory, lanes.get(Lane.STEP, ())
        self.shared += len(step) > 1
        held = sum(self.need(work).held for work in inside)
        prepare = sum(self.need(work).prepare for work in lanes.get(Lane.PREPARE, ()))
        decode = sum(self.need(work).decode for work in lanes.get(Lane.DECODE, ()))
        self.most = max(self.most, held + model.step.of([work.tokens for work in step]) + prepare + decode)

    def _work(self, lane, seconds, ids):
        self.plans.append((self.now, lane, ids))
        super()._work(lane, seconds, ids)

    def _report(self, lane, work):
        if work.ended is not None:
            # it was cancelled while its lane worked on it
            return
        if lane is Lane.PREPARE and self.more_rows:
            self.scheduler.prepared(work.id, (work.tokens + self.more_rows,))
        else:
            super()._report(lane, work)

    def cancel(self, work):
        self.scheduler.remove(work.id)
        work.ended = self.now


def laws(rng):
    return {
        "row": ROW,
        "step": StepLaw(fixed=rng.choice([0, 50]), token=rng.uniform(0, 5), longest=rng.uniform(0, 5)),
        "held": HeldLaw(row=rng.uniform(0, 20), token=rng.uniform(0, 2)),
        "prepare": PixelLaw(fixed=rng.uniform(0, 500), area=rng.uniform(0, 0.02)),
        "decode": PixelLaw(fixed=rng.uniform(0, 50), area=rng.uniform(0, 0.05)),
    }


def mix(seed, capacity=None):
    """A simulation with random laws, jobs and tenants; `capacity` is a factor of the largest job's need by default."""
    rng = random.Random(seed)
    made = laws(rng)
    shares = [(name, Share(weight=rng.choice([1, 1, 4]))) for name in "ab"] if rng.random() < 0.3 else []
    simulation = Metered(
        MemoryModel(**made, capacity=1e12),
        places=rng.choice([1, 2, 4, 8]),
        shares=shares,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
        prepare_ms=rng.choice([0.1, 20.0]),
        decode_ms=rng.choice([0.1, 50.0]),
    )
    sizes = [int(10 ** rng.uniform(0.5, 3.5)) for _ in range(3)]
    for _ in range(rng.randint(2, 12)):
        simulation.add(
            rng.choice("ab" if shares else "a"), rng.choice(sizes), rng.randint(1, 4), rank=rng.choice([0, 1])
        )
    largest = max(simulation.need(work).alone for work in simulation.jobs.values())
    factor = rng.choice([1.0, 1.0, 1.2, 2.0, 4.0])
    simulation.scheduler.memory = MemoryModel(**made, capacity=factor * largest if capacity is None else capacity)
    return simulation, rng


@pytest.mark.parametrize("tenth", range(10))
def test_what_is_predicted_to_be_in_memory_at_once_is_never_more_than_there_is(tenth):
    shared = 0
    for seed in range(200 * tenth, 200 * (tenth + 1)):
        simulation, rng = mix(seed)
        late = [rng.uniform(0, 500) for _ in range(rng.choice([0, 0, 3]))]
        for at in sorted(late):
            simulation.run(until=at)
            simulation.now = max(simulation.now, at)
            simulation.add("a", rng.choice([w.tokens for w in simulation.jobs.values()]), rng.randint(1, 3))
            alive = [work for work in simulation.jobs.values() if work.ended is None]
            if rng.random() < 0.5:
                simulation.cancel(rng.choice(alive))
            simulation.plan()
        simulation.run()
        capacity = simulation.scheduler.memory.capacity
        assert simulation.most <= capacity * (1 + ROUNDING), f"seed {seed}"
        assert all(work.ended is not None for work in simulation.jobs.values()), f"seed {seed}: a job waits for ever"
        shared += simulation.shared
        for tenant in "ab":
            for rank in (0, 1):
                equals = [work for work in simulation.jobs.values() if (work.tenant, work.rank) == (tenant, rank)]
                came = [work.left for work in equals if work.left is not None]
                assert came == sorted(came), f"seed {seed}: one was overtaken by its equal"
    assert shared > 200, "jobs still share steps where there is room"


@pytest.mark.parametrize("seed", range(40))
def test_where_there_is_room_for_all_plans_are_as_without_a_limit(seed):
    limited, free = mix(seed, capacity=1e15)[0], mix(seed, capacity=float("inf"))[0]
    limited.run()
    free.run()
    assert limited.plans == free.plans


def test_the_first_in_line_is_not_overtaken_while_it_waits_for_memory():
    memory = MemoryModel(row=ROW, held=HeldLaw(token=1.0), step=StepLaw(token=1.0), capacity=2100)
    simulation = Metered(memory, places=8)
    small = [simulation.add("a", 100, 50) for _ in range(2)]
    large = simulation.add("a", 1000, 2)
    behind = [simulation.add("a", 10, 1) for _ in range(20)]
    simulation.run()
    assert large.left >= min(work.ended for work in small), "beside both there is no room for it"
    assert all(work.left > large.left for work in behind)
    assert simulation.most <= memory.capacity


def test_small_jobs_share_the_memory_that_a_large_one_has_alone():
    memory = MemoryModel(row=ROW, held=HeldLaw(token=1.0), step=StepLaw(token=3.0), capacity=4000)
    simulation = Metered(memory, places=8)
    large, *small = [simulation.add("a", tokens, 3) for tokens in (1000, 100, 100, 100)]
    simulation.run()
    assert all(work.left >= large.ended for work in small)
    steps = [ids for _, lane, ids in simulation.plans if lane is Lane.STEP]
    assert steps[:3] == [(large.id,)] * 3
    assert max(map(len, steps)) == 3


def test_what_is_larger_than_was_predicted_holds_nobody_up_for_ever():
    for seed in range(100):
        simulation, _ = mix(seed)
        simulation.more_rows = 500
        simulation.run()
        assert all(work.ended is not None for work in simulation.jobs.values()), f"seed {seed}"


def test_a_job_that_was_cancelled_keeps_its_memory_until_its_lane_reports():
    memory = MemoryModel(row=ROW, held=HeldLaw(token=1.0), step=StepLaw(token=1.0), capacity=2000)
    simulation = Metered(memory, places=8)
    first, second = (simulation.add("a", 1000, 5) for _ in range(2))
    simulation.run(until=1.0)
    assert [lane for _, _, lane, _ in simulation._reports] == [Lane.STEP]
    simulation.cancel(first)
    simulation.plan()
    assert second.left is None, "the step is still running"
    simulation.run()
    assert second.ended is not None
    assert simulation.most <= memory.capacity


def item(name, phase, **need):
    request = dataclasses.replace(BASE, id=name)
    return Item(request, rank=0.0, arrival=0, phase=phase, need=Need(**need))


def test_lanes_wait_for_one_another_where_jobs_are_larger_than_was_predicted():
    memory = MemoryModel(step=StepLaw(token=1.0), capacity=100)
    running = item("a", Phase.RUNNING, rows=(60,), step=60)
    ended = item("b", Phase.DECODE_QUEUED, decode=50)
    both = [running, ended]
    assert Room(memory, both, {}).decodes(ended)
    assert not Room(memory, both, {Lane.STEP: [running]}).decodes(ended)
    assert not Room(memory, both, {Lane.DECODE: [ended]}).steps([running])
    assert Room(memory, both, {}).steps([running]), "the decode waits then"
    assert Room(memory, [running], {Lane.PREPARE: [item("c", Phase.PREPARING, prepare=40)]}).steps([running])
    assert not Room(memory, [running], {Lane.PREPARE: [item("c", Phase.PREPARING, prepare=41)]}).steps([running])
    huge = item("d", Phase.RUNNING, rows=(500,), step=500)
    assert Room(memory, [huge], {}).steps([huge]), "nothing would come of waiting"


def test_a_job_in_segments_is_stepped_and_decoded_at_once():
    memory = MemoryModel(step=StepLaw(token=1.0), capacity=100)
    small = item("a", Phase.RUNNING, rows=(10,), step=10, decode=10)
    new = item("b", Phase.WAITING)
    need = Need(rows=(60,), step=60, decode=50)
    assert Room(memory, [small], {}).admits(new, need)
    new.segments = 2
    assert not Room(memory, [small], {}).admits(new, need)
