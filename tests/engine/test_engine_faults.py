"""What is wrong with one job, or with what is said of it, ends that job alone."""

import asyncio

import pytest

from omni_grpc.engine import EngineState, JobState
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code
from omni_grpc.types.plan import Broken, Decoded, DecodedPart, Media, Prepared, RequestStep, SharedBytes, Stepped
from tests.engine.manual import READY, ask, names, png, run_through, started_engine


def media(job, index, data):
    return Media(index=index, data=data, mime_type="image/png", width=2, height=3, seed=7, sha256="0" * 64)


def progress(job, step, **changes):
    values = {"id": job.id, "step": step, "total": 2, "sigma": 0.5, "timestep": 500.0, "rows": 1}
    return RequestStep(**(values | changes))


def assert_failed(job, *words):
    assert (job.state, job.failure.code, job.failure.reason) == (JobState.FAILED, Code.INTERNAL, "ENGINE_ERROR")
    assert all(word in job.failure.message for word in words), job.failure.message


def assert_serves(engine, worker):
    """The engine takes another job all the way, and has no memory of the others."""
    job = ask(engine)
    assert job.request in worker.last.admit
    run_through(worker, job)
    assert job.state is JobState.SUCCEEDED
    assert engine.stats().running == 0


async def test_an_output_whose_block_is_gone_fails_its_job_alone():
    engine, worker = await started_engine()
    job, other = ask(engine, num_outputs=2), ask(engine)
    worker.prepared(job.id)
    worker.prepared(other.id)
    worker.stepped({job.id: 1}, total=1)
    there = shared.put(png(), f"omni-test-{job.id}")
    lost = SharedBytes(name=f"omni-lost-{job.id}", size=3)
    worker.deliver(Decoded(id=job.id, elapsed=0.1, media=(media(job, 0, lost), media(job, 1, there))))
    assert_failed(job, "handling Decoded", lost.name)
    assert job.artifacts == ()
    assert engine.artifacts.size_bytes == 0
    with pytest.raises(FileNotFoundError):
        shared.take(there)
    worker.stepped({other.id: 1}, total=1)
    worker.decoded(other.id)
    assert other.state is JobState.SUCCEEDED
    assert_serves(engine, worker)


@pytest.mark.parametrize("report", ["prepared", "stepped", "part", "decoded", "broken"])
async def test_a_report_that_cannot_be_handled_fails_its_job_alone(report):
    engine, worker = await started_engine()
    job, other = ask(engine), ask(engine)
    if report == "prepared":
        worker.deliver(Prepared(id=job.id, elapsed=0.1, prompt_tokens=5, dropped_tokens=(3,)))
        worker.prepared(other.id)
    elif report == "broken":
        worker.deliver(Broken(id=job.id, phase="prepare", failure=None))
        worker.prepared(other.id)
    else:
        worker.prepared(job.id)
        worker.stepped({job.id: 1})
        worker.prepared(other.id)
        if report == "stepped":
            # in one report with a step that is in order
            worker.deliver(Stepped(elapsed=0.1, progress=(progress(job, None), progress(other, 1))))
            assert other.step == 1
        elif report == "part":
            worker.stepped({job.id: 1})
            worker.deliver(Stepped(elapsed=0.1, progress=(progress(job, 1, part_ready=True),)))
            worker.deliver(DecodedPart(id=job.id, elapsed="x", done=1, total=2))
        else:
            worker.stepped({job.id: 2})
            worker.deliver(Decoded(id=job.id, elapsed="x", media=()))
    assert_failed(job)
    assert engine.artifacts.size_bytes == 0
    assert other.state is JobState.RUNNING
    engine.cancel(other.id, "enough")


async def test_a_plan_that_cannot_be_sent_fails_the_jobs_it_admits():
    engine, worker = await started_engine(max_num_seqs=1)
    send, bad = worker.submit, []

    def submit(plan):
        if any(request.id in bad for request in plan.admit):
            raise TypeError("cannot pickle 'module' object")
        send(plan)

    worker.submit = submit
    first = ask(engine)
    job, after = ask(engine), ask(engine)
    bad.append(job.id)
    run_through(worker, first)
    assert_failed(job, "cannot pickle")
    assert worker.last.admit == (after.request,)
    run_through(worker, after)
    assert [it.state for it in (first, after)] == [JobState.SUCCEEDED] * 2
    assert_serves(engine, worker)


async def test_a_plan_that_cannot_be_sent_preempts_nobody_and_costs_nobody_a_step():
    """The job that would have been preempted goes on as if nothing had been, and says nothing of it."""
    engine, worker = await started_engine(max_num_seqs=1, policy="priority")
    low = ask(engine, priority=0)
    worker.prepared(low.id)
    high = ask(engine, priority=5)
    worker.prepared(high.id)
    send = worker.submit

    def submit(plan):
        if high.id in plan.step:
            raise TypeError("cannot pickle 'module' object")
        send(plan)

    worker.submit = submit
    clock = engine.replicas[0].scheduler._clocks[""]
    worker.stepped({low.id: 1})
    assert_failed(high, "cannot pickle")
    assert worker.last.step == (low.id,)
    # one step of the one job that is left, and not half of one more
    assert engine.replicas[0].scheduler._clocks[""] == clock + engine.replicas[0].scheduler.predicted_ms([low.id])
    worker.stepped({low.id: 2})
    worker.decoded(low.id)
    assert low.state is JobState.SUCCEEDED
    assert not {"Preempted", "Resumed"} & {*names(low), *names(high)}
    assert_serves(engine, worker)


async def test_what_a_plan_that_cannot_be_sent_drops_is_dropped_by_the_next_one():
    engine, worker = await started_engine(max_num_seqs=1)
    cancelled = ask(engine)
    worker.prepared(cancelled.id)
    bad, other = ask(engine, prompt="bad"), ask(engine)
    send, refused = worker.submit, []

    def submit(plan):
        if any(request.prompt == "bad" for request in plan.admit):
            refused.append(plan)
            raise TypeError("cannot pickle 'module' object")
        send(plan)

    worker.submit = submit
    engine.cancel(cancelled.id, "enough")
    assert_failed(bad, "cannot pickle")
    assert refused[0].drop == worker.last.drop == (cancelled.id,)
    assert worker.last.admit == (other.request,)


async def test_a_timer_that_raises_fails_the_job_it_belongs_to():
    engine, worker = await started_engine()
    job = ask(engine)

    def fire(owner, name, seconds):
        raise ValueError("of the timer")

    engine._timers.set(job.id, "limit", 0, fire)
    await job.wait(job.last_seq, timeout=10)
    assert_failed(job, "the timer limit", "of the timer")
    assert worker.last.drop == (job.id,)
    worker.prepared(job.id)
    assert_serves(engine, worker)


async def test_a_worker_that_cannot_be_started_is_started_again():
    engine, worker = await started_engine(restart_backoff=0.001)
    start = worker.start

    def refuse(deliver):
        worker.start = start
        raise OSError("no process is left")

    worker.start = refuse
    worker.died()
    async with asyncio.timeout(10):
        while worker.starts < 2:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)
    assert engine.state is EngineState.RESTARTING
    assert engine.failure.reason == "WORKER_NOT_STARTED"
    worker.deliver(READY)
    assert_serves(engine, worker)


async def test_an_observer_that_raises_does_not_stop_the_engine():
    engine, worker = await started_engine(restart_backoff=0)

    def observe(state):
        raise ValueError

    engine.on_state.insert(0, observe)
    seen = []
    engine.on_state.append(seen.append)
    worker.died()
    await asyncio.sleep(0.01)
    worker.deliver(READY)
    assert seen == [EngineState.RESTARTING, EngineState.READY]
    assert_serves(engine, worker)
