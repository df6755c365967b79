"""Replicas that stop for a while: drained and started anew, asleep and woken. No job is refused or lost for it."""

import asyncio
import dataclasses

import pytest

from omni_grpc.engine import EngineState, JobState
from omni_grpc.engine.replica import ReplicaState
from omni_grpc.types.errors import Code, FailedPrecondition, Failure, NotFound, OmniError
from omni_grpc.types.plan import Sleep, SleepLevel, Slept, Unmoved, Wake, Woken
from tests.engine.manual import READY, ask, names, run_through, started_engine
from tests.engine.test_replicas import admitted, replicated


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


# --- one replica is started anew --------------------------------------------------------------------------------------


async def test_a_replica_is_started_anew_once_it_has_ended_what_it_had():
    engine, one, two = await replicated()
    first, second = ask(engine), ask(engine)
    assert engine.renew(0, 60.0) == 1
    third = ask(engine)
    run_through(two, second)
    # what waits goes to the other
    assert admitted(two) == [second.id, third.id]
    assert one.starts == 1
    run_through(one, first)
    await settle()
    assert (one.starts, one.closed) == (2, True)
    assert engine.state is EngineState.READY
    fourth = ask(engine)
    one.deliver(READY)
    run_through(two, third)
    assert fourth.id in admitted(one)
    run_through(one, fourth)
    assert [job.state for job in (first, second, third, fourth)] == [JobState.SUCCEEDED] * 4
    assert all("Retrying" not in names(job) for job in (first, second, third, fourth))
    await engine.close()


async def test_the_only_replica_is_started_anew_while_jobs_wait_for_it():
    engine, worker = await started_engine()
    running = ask(engine)
    engine.renew(0, 60.0)
    waiting = ask(engine)
    run_through(worker, running)
    await settle()
    assert engine.state is EngineState.RESTARTING
    late = ask(engine)
    assert (waiting.state, late.state) == (JobState.QUEUED, JobState.QUEUED)
    worker.deliver(READY)
    run_through(worker, waiting)
    run_through(worker, late)
    assert late.state is JobState.SUCCEEDED
    assert engine.stats().worker_restarts == 1
    await engine.close()


async def test_what_does_not_end_in_time_fails_as_retryable_and_the_replica_is_started_anew():
    engine, worker = await started_engine()
    running = ask(engine)
    worker.prepared(running.id)
    engine.renew(0, 0.01)
    await asyncio.sleep(0.05)
    worker.stepped({})
    await settle()
    assert (running.failure.code, running.failure.reason) == (Code.UNAVAILABLE, "WORKER_DRAINED")
    assert worker.starts == 2
    await engine.close()


async def test_a_replica_that_dies_while_it_drains_is_started_anew_once():
    engine, one, two = await replicated()
    running = ask(engine)
    engine.renew(0, 60.0)
    one.prepared(running.id)
    one.died()
    await asyncio.sleep(0.02)
    assert one.starts == 2
    one.deliver(READY)
    assert engine.replicas[0].state is ReplicaState.READY
    job = ask(engine)
    assert admitted(one)[-1] == job.id or admitted(two)[-1] == job.id
    await engine.close()


async def test_a_replica_that_is_not_there_or_not_ready_is_refused():
    engine, one, _ = await replicated()
    with pytest.raises(NotFound, match="has no replica 2: they are 0 to 1"):
        engine.renew(2, 1.0)
    one.died()
    with pytest.raises(FailedPrecondition, match="replica 0 is RESTARTING"):
        engine.renew(0, 1.0)
    await engine.close()


# --- sleep and wake ---------------------------------------------------------------------------------------------------


async def asleep(engine, *workers, level=SleepLevel.KEEP_WEIGHTS):
    sleeping = asyncio.ensure_future(engine.sleep(level))
    await settle()
    for worker in workers:
        assert worker.orders[-1] == Sleep(level=level)
        worker.deliver(Slept(freed_bytes=10, elapsed=0.1))
    return await sleeping


async def test_a_model_sleeps_once_what_runs_has_ended_and_what_waits_is_done_after_it_is_woken():
    engine, one, two = await replicated()
    jobs = [ask(engine) for _ in range(3)]
    sleeping = asyncio.ensure_future(engine.sleep(SleepLevel.KEEP_WEIGHTS))
    await settle()
    assert (one.orders, two.orders) == ([], [])
    run_through(one, jobs[0])
    run_through(two, jobs[1])
    await settle()
    assert admitted(one) + admitted(two) == [jobs[0].id, jobs[1].id]
    for worker in (one, two):
        worker.deliver(Slept(freed_bytes=10, elapsed=0.1))
    assert await sleeping == 20
    assert (engine.state, engine.asleep) == (EngineState.ASLEEP, True)
    late = ask(engine)
    waking = asyncio.ensure_future(engine.wake())
    await settle()
    for worker in (one, two):
        assert worker.orders[-1] == Wake()
        worker.deliver(Woken(elapsed=0.1))
    await waking
    assert engine.state is EngineState.READY
    assert {*admitted(one)[1:], *admitted(two)[1:]} == {jobs[2].id, late.id}
    await engine.close()


async def test_a_model_that_cannot_sleep_is_awake_and_goes_on():
    engine, one, two = await replicated()
    sleeping = asyncio.ensure_future(engine.sleep(SleepLevel.KEEP_WEIGHTS))
    await settle()
    one.deliver(Slept(freed_bytes=10, elapsed=0.1))
    two.deliver(Unmoved(failure=Failure(code=Code.RESOURCE_EXHAUSTED, reason="X", message="no host memory")))
    await settle()
    assert one.orders[-1] == Wake()
    one.deliver(Woken(elapsed=0.1))
    with pytest.raises(OmniError, match="no host memory"):
        await sleeping
    assert engine.state is EngineState.READY
    first, second = ask(engine), ask(engine)
    assert (admitted(one), admitted(two)) == ([first.id], [second.id])
    await engine.close()


async def test_a_worker_that_dies_asleep_is_started_only_when_it_is_woken():
    engine, worker = await started_engine(restart_backoff=0.0)
    await asleep(engine, worker)
    worker.died()
    await asyncio.sleep(0.02)
    assert (worker.starts, engine.state) == (1, EngineState.ASLEEP)
    job = ask(engine)
    waking = asyncio.ensure_future(engine.wake())
    await settle()
    assert worker.starts == 2
    worker.deliver(READY)
    await waking
    run_through(worker, job)
    assert job.state is JobState.SUCCEEDED
    await engine.close()


async def test_a_model_that_cannot_be_woken_sleeps_on_and_can_be_woken_later():
    engine, worker = await started_engine()
    await asleep(engine, worker, level=SleepLevel.DROP_WEIGHTS)
    job = ask(engine)
    waking = asyncio.ensure_future(engine.wake())
    await settle()
    worker.deliver(Unmoved(failure=Failure(code=Code.NOT_FOUND, reason="X", message="the checkpoint is gone")))
    with pytest.raises(OmniError, match="the checkpoint is gone"):
        await waking
    assert (engine.state, job.state) == (EngineState.ASLEEP, JobState.QUEUED)
    waking = asyncio.ensure_future(engine.wake())
    await settle()
    worker.deliver(Woken(elapsed=0.1, ready=dataclasses.replace(READY, weight_bytes=11)))
    await waking
    assert engine.ready.weight_bytes == 11
    run_through(worker, job)
    assert job.state is JobState.SUCCEEDED
    await engine.close()


async def test_a_worker_that_dies_while_it_is_woken_is_told_to_who_waits():
    engine, worker = await started_engine()
    await asleep(engine, worker)
    waking = asyncio.ensure_future(engine.wake())
    await settle()
    worker.died()
    with pytest.raises(OmniError, match="gone"):
        await waking
    assert engine.state is EngineState.ASLEEP
    await engine.close()


async def test_a_parked_model_takes_no_jobs():
    engine, worker = await started_engine()
    await asleep(engine, worker)
    engine.parked = True
    with pytest.raises(OmniError, match="put to sleep") as refused:
        ask(engine)
    assert refused.value.failure.reason == "MODEL_ASLEEP"
    await engine.close()


# --- what is predicted ------------------------------------------------------------------------------------------------


async def test_the_delay_of_a_new_job_is_predicted_from_the_work_before_it():
    engine, one, two = await replicated(max_num_seqs=1)
    assert engine.stats().queue_delay is None
    one.prepared(ask(engine, steps=4).id)
    two.prepared(ask(engine, steps=4).id)
    ids = [engine.replicas[0].scheduler.held[0], engine.replicas[1].scheduler.held[0]]
    one.stepped({ids[0]: 1}, total=4)
    # a step takes 0.5 s: three are left on one, four on the other
    assert engine.stats().queue_delay == pytest.approx((3 + 4) * 0.5 / 2)
    ask(engine, steps=10)
    stats = engine.stats()
    assert stats.queue_delay == pytest.approx((3 + 4 + 10) * 0.5 / 2)
    assert stats.work == pytest.approx(17 * 0.5)
    assert [(one.state, one.running) for one in stats.replicas] == [("READY", 1), ("READY", 1)]
    await engine.close()


async def test_steps_that_are_shared_count_once_for_all_that_share_them():
    engine, worker = await started_engine(max_num_seqs=4)
    jobs = [ask(engine, steps=4) for _ in range(6)]
    for job in jobs[:4]:
        worker.prepared(job.id)
    worker.stepped({job.id: 1 for job in jobs[:1]}, total=4)
    # whatever the cost of a step depends on, here it is the same for one job as for four
    work = engine.stats().work
    assert engine.stats().queue_delay < work / 3
    await engine.close()


async def test_a_new_job_waits_for_nothing_where_a_place_is_free():
    engine, worker = await started_engine(max_num_seqs=2)
    job = ask(engine, steps=4)
    worker.prepared(job.id)
    worker.stepped({job.id: 1}, total=4)
    assert engine.stats().queue_delay == 0.0
    await engine.close()
