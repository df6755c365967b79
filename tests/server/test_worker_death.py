"""The worker ends, hangs or gives up: what becomes of its jobs, of those that wait, and of the server."""

import asyncio

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState, JobState, ProcessExecutor, Submission
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.request import Draft
from omni_grpc.v1 import event_pb2, model_pb2
from tests.toy import toy_checkpoint

from .service import CHECKPOINT, image, kinds, serving, to_error, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_running_jobs_fail_as_retryable_and_those_that_wait_go_on_with_the_next_worker():
    async with serving(max_num_seqs=1) as service:
        health = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
        seen = [(await health.read()).status]
        service.executor.gates[Lane.STEP].close()
        running = asyncio.create_task(to_error(service.generation.GenerateImage(image())))
        await until(lambda: service.engine.stats().running == 1)
        waiting = await service.create()
        service.executor.loading.close()
        await service.executor.die()

        messages, error = await running
        assert (error.code, error.reason) == ("UNAVAILABLE", "WORKER_DIED")
        assert "RetryInfo" not in error.details, "how long a worker takes to come back is not known"
        assert messages[-1].event.failed.retryable
        assert (await service.get(messages[0].event.job_id)).retryable

        seen.append((await health.read()).status)
        alive = await health_pb2_grpc.HealthStub(service.channel).Check(
            health_pb2.HealthCheckRequest(service="liveness")
        )
        assert alive.status == SERVING
        later = await service.create()
        assert (await service.get(waiting.job_id)).state == event_pb2.JOB_STATE_QUEUED
        assert (await service.get(later.job_id)).queue_position == 1, "jobs are taken meanwhile"

        service.executor.loading.open()
        service.executor.gates[Lane.STEP].open()
        for job in (waiting, later):
            assert kinds(await service.watch(job.job_id))[-1] == "completed"
        seen.append((await health.read()).status)
        assert seen == [SERVING, NOT_SERVING, SERVING]
        assert service.executor.starts == 2


@pytest.mark.parametrize("lane", [Lane.STEP, Lane.DECODE])
async def test_a_job_is_lost_with_its_worker_once_it_is_prepared(service, lane):
    service.executor.gates[lane].close()
    job = await service.create()
    await until(lambda: service.engine.jobs.get(job.job_id).last_seq == {"step": 3, "decode": 7}[lane])
    await service.executor.die()
    assert (await service.watch(job.job_id))[-1].failed.status.code == 14
    service.executor.gates[lane].open()
    assert kinds(await service.watch((await service.create()).job_id))[-1] == "completed"


async def test_a_job_that_was_not_prepared_starts_again_and_its_watchers_are_told(service):
    service.executor.gates[Lane.PREPARE].close()
    job = await service.create()
    await until(lambda: service.engine.jobs.get(job.job_id).last_seq == 2)
    service.executor.loading.close()
    await service.executor.die()
    waiting = await service.get(job.job_id)
    assert (waiting.state, waiting.HasField("start_time")) == (event_pb2.JOB_STATE_QUEUED, False)
    service.executor.loading.open()
    service.executor.gates[Lane.PREPARE].open()
    events = await service.watch(job.job_id)
    assert kinds(events)[:6] == ["queued", "started", "retrying", "queued", "started", "encode_done"]
    assert kinds(events)[-1] == "completed"
    retrying = events[2].retrying
    assert (retrying.status.code, retrying.attempt, retrying.max_attempts) == (14, 2, 2)
    assert [events[i].started.attempt for i in (1, 4)] == [1, 2]
    assert events[-1].completed.stats.attempts == 2
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_a_model_whose_worker_is_gone_is_loading_and_says_why(service):
    service.executor.loading.close()
    await service.executor.die()
    request = model_pb2.GetModelRequest(model="toy")
    found = (await service.models.GetModel(request)).model
    assert (found.state, found.error.code) == (model_pb2.MODEL_STATE_LOADING, 14)
    assert "SIGKILL" in found.error.message
    service.executor.loading.open()
    await until(lambda: service.engine.state is EngineState.READY)
    found = (await service.models.GetModel(request)).model
    assert (found.state, found.HasField("error")) == (model_pb2.MODEL_STATE_READY, False)


async def test_a_phase_that_hangs_costs_the_worker_its_life():
    async with serving(phase_timeout=1) as service:
        service.executor.gates[Lane.DECODE].close()
        _, error = await to_error(service.generation.GenerateImage(image()))
        assert (error.code, error.reason) == ("UNAVAILABLE", "WORKER_HUNG")
        service.executor.gates[Lane.DECODE].open()
        assert kinds(await service.watch((await service.create()).job_id))[-1] == "completed"


async def test_a_worker_that_dies_while_jobs_drain_comes_back_for_those_that_wait():
    async with serving(max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        running, waiting = [await service.create() for _ in range(2)]
        watching = [asyncio.create_task(service.watch(job.job_id)) for job in (running, waiting)]
        await until(lambda: all(service.engine.jobs.get(job.job_id).watchers for job in (running, waiting)))
        stopping = asyncio.create_task(service.server.stop(drain=600))
        await until(lambda: service.engine.state is EngineState.DRAINING)
        service.executor.gates[Lane.STEP].open()
        await service.executor.die()
        lost, done = await asyncio.gather(*watching)
        assert (kinds(lost)[-1], kinds(done)[-1]) == ("failed", "completed")
        await asyncio.wait_for(stopping, 30)


async def test_a_drain_ends_in_time_though_the_worker_does_not_come_back():
    async with serving(max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        _, waiting = [await service.create() for _ in range(2)]
        stopping = asyncio.create_task(service.server.stop(drain=0.2))
        await until(lambda: service.engine.state is EngineState.DRAINING)
        service.executor.loading.close()
        await service.executor.die()
        await asyncio.wait_for(stopping, 10)
        job = service.engine.jobs.get(waiting.job_id)
        assert (job.failure.reason, job.record.start_time) == ("SERVER_STOPPED", None)


async def test_a_worker_that_dies_as_the_server_stops_is_not_started_again(service):
    await service.server.stop()
    await service.executor.die()
    await asyncio.sleep(0.05)
    assert (service.executor.starts, service.engine.state) == (1, EngineState.STOPPED)


async def test_a_worker_that_gives_up_is_gone_before_the_next_one_and_a_job_kills_no_more_than_two():
    config = EngineConfig.from_settings(model="toy", restart_backoff=0)
    # functions do not pickle by value, and this worker asks for none
    executor = ProcessExecutor(
        config, toy_checkpoint(limits=str, defaults=str), worker="tests.server.sick_worker:serve"
    )
    engine = Engine(config, CHECKPOINT, executor)
    await engine.start()
    first = psutil.Process(engine.ready.pid)
    job, _ = engine.submit(Submission(draft=Draft(model="toy", prompt="x")))
    await until(lambda: engine.state is EngineState.RESTARTING)
    assert not first.is_running()
    assert job.state is JobState.QUEUED
    await until(lambda: job.state.terminal)
    assert (job.state, job.failure.message) == (JobState.FAILED, "a lane broke")
    await until(lambda: engine.state is EngineState.READY)
    assert engine.stats().worker_restarts == 2
    await engine.close()
