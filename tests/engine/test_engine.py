import asyncio
import dataclasses
import time

import pytest

from omni_grpc.engine import EngineState, JobState, Submission
from omni_grpc.store import retention as retention_module
from omni_grpc.types.errors import (
    Aborted,
    Code,
    FailedPrecondition,
    Failure,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.plan import Broken, CostModel, Plan
from omni_grpc.types.request import Draft
from tests.engine.manual import READY, ask, names, png, run_through, started_engine


def preview(step):
    return PreviewImage(index=0, mime_type="image/webp", data=bytes([step]), width=4, height=4)


async def test_a_job_goes_through_the_phases_and_says_so():
    engine, worker = await started_engine()
    job = ask(engine, seeds=(7,), num_outputs=2)
    assert worker.last == Plan(admit=(job.request,))
    worker.prepared(job.id, prompt_tokens=9)
    assert worker.last == Plan(step=(job.id,))
    worker.stepped({job.id: 1})
    assert worker.last == Plan(step=(job.id,))
    assert (job.state, job.step, job.total_steps) == (JobState.RUNNING, 1, 2)
    worker.stepped({job.id: 2})
    assert worker.last == Plan(decode=(job.id,))
    worker.decoded(job.id, outputs=2)

    assert names(job) == [
        "Queued", "Started", "EncodeDone", "StepProgress", "StepProgress", "DecodeProgress", "ArtifactReady",
        "ArtifactReady", "Completed",
    ]  # fmt: skip
    assert [entry.seq for entry in job.entries] == list(range(1, 10))
    started, done = job.entries[1].event, job.entries[-1].event
    assert (started.seeds, started.width, started.height, started.total_steps) == ((7, 8), 256, 128, 2)
    assert job.entries[2].event.prompt_tokens == 9
    assert [(e.event.step, e.event.sigma) for e in job.entries[3:5]] == [(1, 1.0), (2, 0.5)]
    assert job.entries[4].event.eta == 0
    assert (done.effective.steps, done.effective.evals, done.effective.scheduler) == (2, 2, "ToyScheduler")
    assert done.effective.defaults_used["width"] == "256"
    assert (done.stats.encode, done.stats.decode, done.stats.peak_memory_bytes) == (0.1, 0.2, 1000)
    assert [artifact.seed for artifact in done.artifacts] == [7, 8]
    assert await engine.artifacts.data(job.artifacts[1].artifact_id) == png()
    assert job.state is JobState.SUCCEEDED
    assert engine.stats().running == 0


async def test_running_jobs_share_a_step_and_a_new_one_joins_between_steps():
    engine, worker = await started_engine(max_num_seqs=2)
    first = ask(engine, steps=3)
    worker.prepared(first.id)
    second, third = ask(engine, steps=2), ask(engine, steps=1)
    worker.prepared(second.id)
    assert third.state is JobState.QUEUED, "two requests are running, the most that may"
    assert worker.last.step == (), "the step lane is busy with the first job"
    worker.stepped({first.id: 1}, total=3)
    assert worker.last.step == (first.id, second.id)
    worker.stepped({first.id: 2, second.id: 1}, total=3)
    worker.stepped({first.id: 3, second.id: 2}, total=3)
    assert worker.last.decode == (first.id,)
    assert worker.last.admit == (third.request,), "a job that waits for its decode makes room"


async def test_tokens_that_did_not_fit_are_a_warning_of_the_result():
    engine, worker = await started_engine()
    job = ask(engine)
    worker.prepared(job.id, dropped_tokens=(("prompt", 3), ("negative_prompt", 0)))
    worker.stepped({job.id: 1}, total=1)
    worker.decoded(job.id)
    assert job.effective.dropped_tokens == {"prompt": 3, "negative_prompt": 0}
    assert [(w.code, w.field, w.applied) for w in job.warnings] == [("PROMPT_TRUNCATED", "prompt", "3")]


async def test_a_full_queue_refuses_and_says_when_to_come_back():
    engine, _ = await started_engine(max_queue=1)
    ask(engine)
    waiting = ask(engine)
    with pytest.raises(ResourceExhausted) as caught:
        ask(engine)
    assert (caught.value.reason, caught.value.failure.retry_after) == ("QUEUE_FULL", 1.0)
    assert len(engine.jobs) == 2
    assert engine.queue_position(waiting) == 0


async def test_refusals_leave_no_job_behind():
    engine, worker = await started_engine()
    with pytest.raises(InvalidArgument):
        ask(engine, width=17)
    with pytest.raises(NotFound):
        ask(engine, model="other")
    assert len(engine.jobs) == 0
    assert worker.plans == []


async def cancel_in_queue(engine, worker):
    blocker = ask(engine)
    job = ask(engine)
    engine.cancel(job.id, "enough")
    worker.prepared(blocker.id)
    assert all(job.request not in plan.admit for plan in worker.plans)
    return job, 0


async def cancel_in_prepare(engine, worker):
    job = ask(engine)
    engine.cancel(job.id, "enough")
    assert worker.last.drop == (job.id,)
    worker.prepared(job.id)
    return job, 0


async def cancel_in_step(engine, worker):
    job = ask(engine)
    worker.prepared(job.id)
    worker.stepped({job.id: 1}, total=5)
    engine.cancel(job.id, "enough")
    assert worker.last.drop == (job.id,)
    worker.stepped({job.id: 2}, total=5)
    assert worker.last.step == (), "no step follows the one in flight"
    return job, 1


async def cancel_in_decode(engine, worker):
    job = ask(engine)
    worker.prepared(job.id)
    worker.stepped({job.id: 1}, total=1)
    engine.cancel(job.id, "enough")
    worker.decoded(job.id)
    return job, 1


@pytest.mark.parametrize("scenario", [cancel_in_queue, cancel_in_prepare, cancel_in_step, cancel_in_decode])
async def test_a_cancelled_job_ends_at_once_and_the_next_one_runs(scenario):
    engine, worker = await started_engine(max_num_seqs=1)
    job, completed = await scenario(engine, worker)
    end = job.entries[-1].event
    assert (type(end).__name__, end.reason, end.completed_steps) == ("Cancelled", "enough", completed)
    assert names(job).count("Cancelled") == 1
    assert job.artifacts == ()
    assert engine.cancel(job.id, "again") is job
    assert len(names(job)) == job.last_seq
    for other in engine.jobs.newest(states=(JobState.RUNNING, JobState.QUEUED)):
        engine.cancel(other.id, "clean up")
    # the lanes that the worker still reports for come free, and a new job gets through all of them
    if scenario is cancel_in_queue:
        worker.stepped({})
    fresh = ask(engine)
    assert fresh.request in worker.last.admit
    worker.prepared(fresh.id)
    worker.stepped({fresh.id: 1}, total=1)
    worker.decoded(fresh.id)
    assert fresh.state is JobState.SUCCEEDED
    assert engine.artifacts.size_bytes == len(png()), "outputs of the cancelled job are not kept"


@pytest.mark.parametrize("phase", ["prepare", "step", "decode"])
async def test_a_failure_ends_its_job_alone(phase):
    engine, worker = await started_engine()
    good, bad = ask(engine), ask(engine)
    worker.prepared(good.id)
    if phase == "prepare":
        worker.broken(bad.id, "prepare")
        worker.stepped({good.id: 1}, total=1)
    else:
        worker.prepared(bad.id)
        worker.stepped({good.id: 1})
        if phase == "step":
            failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="no room")
            worker.stepped({good.id: 2}, broken=(Broken(id=bad.id, phase="step", failure=failure),))
            assert bad.failure is failure
        else:
            worker.stepped({good.id: 2, bad.id: 2})
    worker.decoded(good.id)
    if phase == "decode":
        worker.broken(bad.id, "decode")
    assert (good.state, bad.state) == (JobState.SUCCEEDED, JobState.FAILED)
    assert names(bad)[-1] == "Failed"
    assert engine.stats().running == 0


async def test_time_limits_end_a_job_in_every_phase():
    engine, worker = await started_engine(max_num_seqs=1)
    running = ask(engine, run_timeout=0.02)
    waiting = ask(engine, queue_timeout=0.01)
    dated = ask(engine, deadline=time.time() + 0.01)
    worker.prepared(running.id)
    worker.stepped({running.id: 1}, total=9)
    for job, reason in ((waiting, "QUEUE_TIMEOUT"), (dated, "DEADLINE"), (running, "RUN_TIMEOUT")):
        while not job.state.terminal:
            assert await job.wait(job.last_seq, timeout=10)
        assert (job.failure.code, job.failure.reason) == (Code.DEADLINE_EXCEEDED, reason)
    assert "after 1 of 2 steps" in running.failure.message
    assert worker.last.drop == (running.id,)
    assert all(
        names.keys() == {"retention"} for owner, names in engine._timers._handles.items() if owner.startswith("job_")
    )


async def test_a_job_that_ends_in_time_keeps_no_timer():
    engine, worker = await started_engine()
    job = ask(engine, queue_timeout=60, run_timeout=60, deadline=time.time() + 60)
    run_through(worker, job)
    assert engine._timers._handles == {}


async def test_a_preempted_job_says_so_and_ends_with_all_its_steps():
    engine, worker = await started_engine(policy="priority", max_num_seqs=1)
    low = ask(engine, steps=3)
    worker.prepared(low.id)
    worker.stepped({low.id: 1}, total=3)
    high = ask(engine, steps=1, priority=1)
    worker.prepared(high.id)
    worker.stepped({low.id: 2}, total=3)
    assert worker.last.step == (high.id,)
    assert low.state is JobState.PREEMPTED
    event = low.entries[-1].event
    assert (event.completed_steps, event.reason, event.position) == (2, "priority", 1)
    worker.stepped({high.id: 1}, total=1)
    assert low.state is JobState.RUNNING
    assert low.entries[-1].event.completed_steps == 2
    worker.stepped({low.id: 3}, total=3)
    worker.decoded(high.id)
    worker.decoded(low.id)
    assert [job.state for job in (low, high)] == [JobState.SUCCEEDED] * 2
    assert names(low).count("StepProgress") == 3


async def test_only_the_newest_previews_are_kept():
    engine, worker = await started_engine()
    job = ask(engine)
    worker.prepared(job.id)
    for step in (1, 2):
        worker.stepped({job.id: step}, total=3, previews=(preview(step),))
    assert job.previews == (preview(2),)
    assert job.entries[job.preview_seq - 1].event.step == 2
    worker.stepped({job.id: 3}, total=3)
    assert job.preview_seq == job.last_seq - 2


async def test_the_cost_model_of_the_worker_plans_steps_and_is_checked_against_them():
    engine, worker = await started_engine(max_step_ms=100)
    worker.deliver(dataclasses.replace(READY, cost=CostModel(fixed=0.0, token=1.0)))
    a, b = ask(engine), ask(engine)
    worker.prepared(a.id, rows=(60,))
    worker.prepared(b.id, rows=(60,))
    seen = set()
    for _ in range(50):
        (job_id,) = worker.last.step  # together they would take 120 ms
        seen.add(job_id)
        worker.stepped({job_id: 1}, total=99)
    assert seen == {a.id, b.id}
    stats = engine.stats()
    assert stats.cost.token == 1.0
    assert stats.cost_error == pytest.approx(500 / 60, rel=0.05)


async def test_closing_lets_running_jobs_end_and_refuses_new_ones():
    engine, worker = await started_engine()
    job = ask(engine)
    closing = asyncio.ensure_future(engine.close(drain_timeout=60))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as caught:
        ask(engine)
    assert caught.value.reason == "ENGINE_DRAINING"
    worker.prepared(job.id)
    worker.stepped({job.id: 1}, total=1)
    worker.decoded(job.id)
    await closing
    assert job.state is JobState.SUCCEEDED
    assert worker.closed


async def test_closing_without_time_fails_what_runs_as_retryable():
    engine, _ = await started_engine()
    job = ask(engine)
    await engine.close()
    assert (job.failure.reason, job.failure.retryable) == ("SERVER_STOPPED", True)


async def test_a_request_id_makes_one_job_and_refuses_another_body():
    engine, _ = await started_engine()
    job, again = engine.submit(Submission(draft=Draft(model="toy", prompt="x"), request_id="r", fingerprint=b"1"))
    assert not again
    assert engine.submit(Submission(draft=Draft(model="toy", prompt="x"), request_id="r", fingerprint=b"1")) == (
        job,
        True,
    )
    with pytest.raises(Aborted) as caught:
        engine.submit(Submission(draft=Draft(model="toy", prompt="y"), request_id="r", fingerprint=b"2"))
    assert caught.value.failure.metadata == {"job_id": job.id}
    assert ask(engine, request_id="") is not ask(engine, request_id="")


async def test_a_job_tied_to_its_watchers_is_cancelled_after_the_grace():
    engine, _ = await started_engine()
    job = ask(engine, cancel_on_disconnect=True, disconnect_grace=0.01)
    with engine.watching(job):
        pass
    assert await job.wait(job.last_seq, timeout=10)
    assert names(job)[-1] == "Cancelled"


async def test_a_watcher_that_comes_back_in_time_saves_the_job():
    engine, _ = await started_engine()
    job = ask(engine, cancel_on_disconnect=True, disconnect_grace=0.05)
    with engine.watching(job):
        pass
    with engine.watching(job):
        await asyncio.sleep(0.15)
        assert not job.state.terminal
        with engine.watching(job):
            pass
        await asyncio.sleep(0.15)
        assert not job.state.terminal, "one watcher is still there"


async def test_a_job_that_is_not_tied_outlives_its_watchers():
    engine, _ = await started_engine(disconnect_grace=0.01)
    job = ask(engine)
    with engine.watching(job):
        pass
    await asyncio.sleep(0.05)
    assert not job.state.terminal


def finish(engine, worker, **changes):
    job = ask(engine, **changes)
    run_through(worker, job)
    return job


async def test_finished_jobs_are_forgotten_after_their_retention():
    engine, worker = await started_engine(retention=0.01)
    job = finish(engine, worker)
    kept = finish(engine, worker, retention=60)
    await asyncio.sleep(0.05)
    with pytest.raises(NotFound):
        engine.jobs.get(job.id)
    with pytest.raises(NotFound):
        await engine.artifacts.find(job.artifacts[0].artifact_id)
    assert engine.artifacts.size_bytes == len(png())
    assert engine.jobs.get(kept.id).record.expire_time == pytest.approx(time.time() + 60, abs=5)


async def test_a_job_is_not_forgotten_under_its_reader(monkeypatch):
    monkeypatch.setattr(retention_module, "WATCHED_RETENTION", 0.01)
    engine, worker = await started_engine(retention=0.01)
    job = finish(engine, worker)
    with engine.watching(job):
        await asyncio.sleep(0.05)
        assert engine.jobs.get(job.id) is job
    await asyncio.sleep(0.05)
    assert job.id not in engine.jobs


async def test_the_artifact_budget_forgets_the_oldest_finished_job_that_nobody_watches():
    engine, worker = await started_engine(artifact_budget=2 * len(png()))
    watched, old, new = finish(engine, worker), finish(engine, worker), None
    with engine.watching(watched):
        new = finish(engine, worker)
    assert watched.id in engine.jobs
    assert old.id not in engine.jobs
    assert new.id in engine.jobs


async def test_only_finished_jobs_can_be_deleted():
    engine, _ = await started_engine()
    job = ask(engine, request_id="r")
    with pytest.raises(FailedPrecondition) as caught:
        await engine.storage.delete(job)
    assert caught.value.reason == "JOB_NOT_FINISHED"
    engine.cancel(job.id, "x")
    await engine.storage.delete(job)
    with pytest.raises(NotFound):
        await engine.jobs.find(job.id)
    assert ask(engine, request_id="r") is not job


async def test_an_observer_sees_each_state_once():
    engine, _ = await started_engine()
    seen = []
    engine.on_state.append(seen.append)
    await engine.close()
    await engine.close()
    assert seen == [EngineState.DRAINING, EngineState.STOPPED]
