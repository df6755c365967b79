"""Several workers of one model: one queue, one account of each tenant, and no job lost with any of them."""

import asyncio

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState, JobState, Share
from omni_grpc.engine.replica import ReplicaState
from tests.engine.manual import READY, ManualExecutor, ask, names, run_through
from tests.server.service import until
from tests.toy import toy_checkpoint


async def replicated(count=2, **settings):
    """An engine all of whose workers have said Ready."""
    workers = [ManualExecutor() for _ in range(count)]
    config = EngineConfig.from_settings(model="toy", **{"max_num_seqs": 1, "restart_backoff": 0.0} | settings)
    engine = Engine(config, toy_checkpoint(), workers[0], more=workers[1:])
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    for worker in workers:
        worker.deliver(READY)
    await starting
    return engine, *workers


def admitted(worker):
    return [request.id for plan in worker.plans for request in plan.admit]


async def test_no_job_waits_while_a_replica_could_take_it():
    engine, one, two = await replicated()
    jobs = [ask(engine) for _ in range(3)]
    assert (admitted(one), admitted(two)) == ([jobs[0].id], [jobs[1].id])
    assert engine.queue_position(jobs[2]) == 0
    assert jobs[2].state is JobState.QUEUED
    run_through(two, jobs[1])
    assert admitted(two) == [jobs[1].id, jobs[2].id]
    assert jobs[0].state is JobState.RUNNING


async def test_whoever_has_the_least_to_do_takes_the_next_job():
    engine, one, two = await replicated(max_num_seqs=4)
    long, short = ask(engine, steps=50), ask(engine, steps=2)
    assert (admitted(one), admitted(two)) == ([long.id], [short.id])
    one.prepared(long.id)
    two.prepared(short.id)
    third = ask(engine, steps=2)
    assert admitted(two) == [short.id, third.id]


async def test_a_replica_that_dies_harms_no_job_of_another_and_gives_its_unprepared_ones_back():
    engine, one, two = await replicated()
    running, unprepared = ask(engine), ask(engine)
    one.prepared(running.id)
    two.died()
    assert engine.state is EngineState.READY
    assert unprepared.state is JobState.QUEUED
    assert names(unprepared)[-2:] == ["Retrying", "Queued"]
    one.stepped({running.id: 1}, total=1)
    one.decoded(running.id)
    assert running.state is JobState.SUCCEEDED
    assert admitted(one) == [running.id, unprepared.id], "the other one takes it"
    await until(lambda: two.starts == 2)
    two.deliver(READY)
    assert admitted(two)[-1:] == [unprepared.id]
    later = ask(engine)
    assert admitted(two)[-1] == later.id


async def test_what_a_dead_replica_had_begun_fails_as_retryable_and_nothing_else():
    engine, one, two = await replicated()
    lost, kept = ask(engine), ask(engine)
    one.prepared(lost.id)
    two.prepared(kept.id)
    one.died()
    assert (lost.state, lost.failure.retryable) == (JobState.FAILED, True)
    two.stepped({kept.id: 1}, total=1)
    two.decoded(kept.id)
    assert kept.state is JobState.SUCCEEDED
    assert engine.stats().worker_restarts == 0
    await until(lambda: one.starts == 2)
    assert engine.stats().worker_restarts == 1


async def test_the_engine_restarts_only_when_no_replica_is_left():
    engine, one, two = await replicated(restart_backoff=60)
    states = []
    engine.on_state.append(states.append)
    one.died()
    assert (states, engine.failure) == ([], None)
    two.died()
    assert states == [EngineState.RESTARTING]
    assert engine.failure.reason == "WORKER_DIED"
    waiting = ask(engine)
    assert waiting.state is JobState.QUEUED


async def test_a_limit_of_a_tenant_holds_over_all_replicas():
    engine, one, two = await replicated()
    engine.share_by(lambda tenant: Share(max_running=1))
    first, second = ask(engine, tenant="a"), ask(engine, tenant="a")
    other = ask(engine, tenant="b")
    assert (admitted(one), admitted(two)) == ([first.id], [other.id])
    run_through(two, other)
    assert second.state is JobState.QUEUED
    run_through(one, first)
    assert second.id in admitted(one) + admitted(two)


async def test_a_tenant_that_has_had_steps_on_one_replica_waits_behind_one_that_has_not_on_the_other():
    engine, one, two = await replicated()
    greedy = [ask(engine, tenant="greedy") for _ in range(4)]
    modest = ask(engine, tenant="modest")
    run_through(one, greedy[0])
    assert admitted(one)[-1] == modest.id
    assert engine.queue_position(greedy[3]) == 1
    assert two.plans[0].admit[0].id == greedy[1].id


async def test_a_job_is_cancelled_where_it_runs():
    engine, one, two = await replicated()
    first, second = ask(engine), ask(engine)
    one.prepared(first.id)
    two.prepared(second.id)
    engine.cancel(second.id, "enough")
    two.stepped({second.id: 1})
    assert two.last.drop == (second.id,)
    assert all(plan.drop == () for plan in one.plans)
    one.stepped({first.id: 1}, total=1)
    one.decoded(first.id)
    assert first.state is JobState.SUCCEEDED


async def test_a_higher_rank_preempts_on_the_replica_that_takes_it():
    engine, one, two = await replicated(policy="priority")
    low = [ask(engine, steps=9), ask(engine, steps=9)]
    for worker, job in zip((one, two), low, strict=True):
        worker.prepared(job.id)
    high = ask(engine, steps=1, priority=5)
    (taker,) = (worker for worker in (one, two) if high.id in admitted(worker))
    other = two if taker is one else one
    taker.prepared(high.id)
    taker.stepped({low[0 if taker is one else 1].id: 1}, total=9)
    assert taker.last.step == (high.id,)
    other.stepped({low[1 if taker is one else 0].id: 1}, total=9)
    assert other.last.step == (low[1 if taker is one else 0].id,)


async def test_a_first_worker_that_cannot_load_ends_the_start():
    workers = [ManualExecutor(), ManualExecutor()]
    engine = Engine(EngineConfig.from_settings(model="toy"), toy_checkpoint(), workers[0], more=workers[1:])
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    workers[1].died()
    assert isinstance(await asyncio.gather(starting, return_exceptions=True), list)
    assert engine.state is EngineState.FAILED


async def test_one_replica_is_enough_to_begin_with():
    workers = [ManualExecutor(), ManualExecutor()]
    config = EngineConfig.from_settings(model="toy", restart_backoff=60)
    engine = Engine(config, toy_checkpoint(), workers[0], more=workers[1:])
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    workers[1].deliver(READY)
    await starting
    job = ask(engine)
    assert admitted(workers[1]) == [job.id]
    workers[0].died()
    assert engine.state is EngineState.READY
    assert [replica.state for replica in engine.replicas] == [ReplicaState.RESTARTING, ReplicaState.READY]


async def test_closing_ends_every_worker():
    engine, one, two = await replicated()
    await engine.close()
    assert (one.closed, two.closed) == (True, True)
