"""Limits in time: how long a job may wait, run and take in all, and how long it is kept."""

import time

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import event_pb2, job_pb2

from .service import Service, image, kinds, refusal, serving, to_error, until

SOON = {"nanos": 50_000_000}


def deadline() -> dict[str, int]:
    nanos = time.time_ns() + SOON["nanos"]
    return {"seconds": nanos // 10**9, "nanos": nanos % 10**9}


async def ended(service: Service, **options):
    """The events of a generation that a limit ends, and the status of its call."""
    messages, error = await to_error(service.generation.GenerateImage(image(options=options)))
    events = [message.event for message in messages]
    failed = events[-1].failed
    assert (error.code, failed.status.code, failed.retryable) == ("DEADLINE_EXCEEDED", 4, False)
    assert error.message == failed.status.message
    job = await service.get(events[0].job_id)
    assert (job.state, job.error) == (event_pb2.JOB_STATE_FAILED, failed.status)
    return events, error


@pytest.mark.parametrize("limit", ["queue_timeout", "deadline"])
async def test_a_job_that_waits_for_too_long_never_starts(limit):
    async with serving(max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        first = await service.create()
        events, error = await ended(service, **{limit: deadline() if limit == "deadline" else SOON})
        assert kinds(events) == ["queued", "failed"]
        assert error.reason == limit.upper()
        service.executor.gates[Lane.STEP].open()
        assert kinds(await service.watch(first.job_id))[-1] == "completed"
        assert len([request for plan in service.executor.plans for request in plan.admit]) == 1


@pytest.mark.parametrize("limit", ["run_timeout", "deadline"])
async def test_a_job_that_runs_for_too_long_is_taken_from_the_worker(service, limit):
    service.executor.gates[Lane.STEP].close()
    service.executor.gates[Lane.STEP].let(2)
    events, error = await ended(service, **{limit: deadline() if limit == "deadline" else SOON})
    assert kinds(events)[-2:] == ["step_progress", "failed"]
    assert (error.reason, events[-1].failed.stats.steps_run) == (limit.upper(), 2)
    assert "after 2 of 3 steps" in error.message
    assert events[0].job_id in service.executor.plans[-1].drop
    service.executor.gates[Lane.STEP].open()
    assert kinds(await service.watch((await service.create()).job_id))[-1] == "completed", "the lane is free again"


async def test_the_time_to_wait_is_over_once_a_job_has_started(service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create(options={"queue_timeout": {"nanos": 1}})
    late = await service.create(options={"run_timeout": SOON})
    await until(lambda: service.engine.jobs.get(late.job_id).state.terminal)
    service.executor.gates[Lane.STEP].open()
    assert kinds(await service.watch(job.job_id))[-1] == "completed"


async def test_the_server_has_limits_for_those_who_name_none():
    async with serving(max_num_seqs=1, queue_timeout=0.1, run_timeout=0.05) as service:
        service.executor.gates[Lane.STEP].close()
        own = await service.create(options={"run_timeout": {"seconds": 600}})
        waiting = await service.create()
        await until(lambda: service.engine.jobs.get(waiting.job_id).state.terminal)
        assert service.engine.jobs.get(waiting.job_id).failure.reason == "QUEUE_TIMEOUT"
        assert not service.engine.jobs.get(own.job_id).state.terminal, "what a request says goes first"
        await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=own.job_id))
        _, error = await to_error(service.generation.GenerateImage(image()))
        assert error.reason == "RUN_TIMEOUT"


async def test_a_job_is_kept_for_as_long_as_it_asked(service):
    long = await service.finished(options={"retention": {"seconds": 3600}})
    assert long.expire_time.ToNanoseconds() - long.end_time.ToNanoseconds() == pytest.approx(3600e9, rel=0.01)
    kept = await service.finished()
    assert kept.expire_time.ToNanoseconds() - kept.end_time.ToNanoseconds() == pytest.approx(600e9, rel=0.01)
    short = await service.create(options={"retention": SOON})
    await until(lambda: short.job_id not in service.engine.jobs)
    assert (await refusal(service.jobs.GetJob(job_pb2.GetJobRequest(job_id=short.job_id)))).reason == "JOB_NOT_FOUND"
    assert (await service.get(long.job_id), await service.get(kept.job_id)) == (long, kept)


async def test_a_job_that_is_not_kept_at_all_still_reaches_those_who_watch_it(service):
    call = service.generation.GenerateImage(image(options={"retention": {}}))
    events = [message.event async for message in call]
    assert kinds(events)[-3:] == ["artifact_ready", "artifact_chunk", "completed"]
