"""A worker that dies, hangs or does not load: what the engine makes of it."""

import asyncio
import dataclasses
import time

import pytest

from omni_grpc.config import EngineConfig, WorkerConfig
from omni_grpc.engine import Engine, EngineState, JobState
from omni_grpc.types.errors import Code, FailedPrecondition, NotFound, Unavailable
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Fetched
from omni_grpc.types.request import Task
from tests.engine.manual import READY, ManualExecutor, ask, names, run_through, started_engine
from tests.toy import toy_checkpoint


async def test_a_dead_worker_fails_what_it_held_and_the_queue_waits_for_the_next_one():
    engine, worker = await started_engine(max_num_seqs=1, restart_backoff=0)
    running, waiting = ask(engine), ask(engine)
    worker.prepared(running.id)
    seen = []
    engine.on_state.append(seen.append)
    worker.died()
    assert (running.failure.code, running.failure.reason) == (Code.UNAVAILABLE, "WORKER_DIED")
    assert running.failure.retryable
    assert waiting.state is JobState.QUEUED
    late = ask(engine)
    await asyncio.sleep(0.01)
    assert worker.starts == 2
    worker.deliver(READY)
    assert seen == [EngineState.RESTARTING, EngineState.READY]
    assert worker.last.admit == (waiting.request,)
    for job in (waiting, late):
        run_through(worker, job)
        assert job.state is JobState.SUCCEEDED
    assert engine.stats().worker_restarts == 1


async def test_a_job_that_comes_between_a_death_and_the_news_of_it_waits_for_the_next_worker():
    engine, worker = await started_engine(restart_backoff=0)
    running = ask(engine)
    worker.prepared(running.id)
    worker.gone = True
    job = ask(engine)
    assert (job.state, names(job)) == (JobState.QUEUED, ["Queued"])
    worker.died()
    assert running.state is JobState.FAILED
    await asyncio.sleep(0.01)
    worker.deliver(READY)
    assert worker.last.admit == (job.request,)
    run_through(worker, job)
    assert job.state is JobState.SUCCEEDED
    assert names(job).count("Started") == 1


async def test_a_job_that_the_dead_worker_had_not_prepared_goes_back_to_the_queue_once():
    engine, worker = await started_engine(max_num_seqs=1, restart_backoff=0.005)
    job, later = ask(engine), ask(engine)
    assert (job.state, job.record.start_time is None) == (JobState.RUNNING, False)
    worker.died()
    assert (job.state, job.record.start_time, engine.queue_position(later)) == (JobState.QUEUED, None, 1)
    assert names(job) == ["Queued", "Started", "Retrying", "Queued"]
    retrying, queued = (entry.event for entry in job.entries[2:])
    assert (retrying.failure.reason, retrying.attempt, retrying.max_attempts) == ("WORKER_DIED", 2, 2)
    assert (retrying.delay, queued.position, queued.queue_depth) == (0.005, 0, 2)
    await asyncio.sleep(0.02)
    worker.deliver(READY)
    assert worker.last.admit == (job.request,)
    assert (job.state, job.entries[-1].event.attempt) == (JobState.RUNNING, 2)
    worker.died()
    assert (job.state, job.failure.reason, job.failure.retryable) == (JobState.FAILED, "WORKER_DIED", True)
    await asyncio.sleep(0.03)
    worker.deliver(READY)
    run_through(worker, later)
    assert later.state is JobState.SUCCEEDED
    assert names(later).count("Started") == 1


async def test_the_limits_of_a_job_that_goes_back_begin_anew_and_its_deadline_does_not():
    engine, worker = await started_engine(restart_backoff=60)
    timers = engine._timers._handles
    job = ask(engine, queue_timeout=0.05, run_timeout=60, deadline=time.time() + 60)
    deadline = timers[job.id]["deadline"]
    assert timers[job.id].keys() == {"run_timeout", "deadline"}
    worker.died()
    assert timers[job.id].keys() == {"queue_timeout", "deadline"}
    assert timers[job.id]["deadline"].when() == pytest.approx(deadline.when(), abs=0.05)
    while not job.state.terminal:
        assert await job.wait(job.last_seq, timeout=10)
    assert job.failure.reason == "QUEUE_TIMEOUT"
    await engine.close()


async def test_a_worker_that_keeps_dying_is_started_again_and_again_with_growing_pauses(monkeypatch):
    engine, worker = await started_engine(restart_backoff=1.0)
    pauses = []
    monkeypatch.setattr(engine._timers, "set", lambda owner, name, seconds, fire: pauses.append((name, seconds)))
    for _ in range(8):
        worker.died()
    assert pauses == [("restart", seconds) for seconds in (1, 2, 4, 8, 16, 32, 60, 60)]
    worker.deliver(READY)
    worker.died()
    assert pauses[-1] == ("restart", 1)


async def test_a_lane_that_never_reports_gets_the_worker_killed():
    engine, worker = await started_engine(phase_timeout=1, restart_backoff=0)
    engine.config = dataclasses.replace(engine.config, worker=WorkerConfig(phase_timeout=0.01, restart_backoff=0))
    job = ask(engine)
    await asyncio.sleep(0.05)
    assert worker.kills == 1
    worker.died()
    assert job.state is JobState.FAILED


async def test_a_worker_that_cannot_load_fails_the_start_with_its_reason():
    worker = ManualExecutor()
    engine = Engine(EngineConfig.from_settings(model="toy"), toy_checkpoint(), worker)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="loading"):
        ask(engine)
    assert engine.start_failure is None
    worker.died()
    assert engine.start_failure.reason == "WORKER_DIED"
    with pytest.raises(Unavailable, match="gone"):
        await starting
    await engine.close()
    assert worker.closed


async def test_jobs_are_refused_with_how_far_loading_is_until_the_model_is_ready():
    worker = ManualExecutor()
    unknown = toy_checkpoint(tasks=())
    engine = Engine(EngineConfig.from_settings(model="toy"), unknown, worker)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    worker.deliver(
        Loading(phase=LoadPhase.DOWNLOADING, component="vae", file="vae/a", done_bytes=1_250_000, total_bytes=5 * 10**9)
    )
    with pytest.raises(Unavailable, match=r"downloading vae, 1\.25 MB of 5 GB") as caught:
        engine.check("toy", Task.TEXT_TO_IMAGE)
    assert (caught.value.reason, caught.value.failure.retry_after) == ("MODEL_LOADING", 1.0)
    assert caught.value.failure.metadata == {"phase": "DOWNLOADING"}
    with pytest.raises(NotFound):
        engine.check("other", Task.TEXT_TO_IMAGE)
    worker.deliver(Fetched(checkpoint=toy_checkpoint()))
    worker.deliver(Loading(phase=LoadPhase.WARMING_UP))
    with pytest.raises(Unavailable, match="is not ready: warming up"):
        ask(engine)
    with pytest.raises(FailedPrecondition):
        engine.check("toy", Task.IMAGE_EDIT)  # it can be told now, and waiting would not help
    worker.deliver(READY)
    await starting
    engine.check("toy", Task.TEXT_TO_IMAGE)
    run_through(worker, ask(engine))
    worker.died()
    assert engine.start_failure is None, "it was ready once"
    await engine.close()
