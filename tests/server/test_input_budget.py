"""Decoded inputs wait in shared memory, within a budget, and nothing of them is left whatever becomes of their job."""

import asyncio
import pickle
from pathlib import Path

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import job_pb2

from .service import refusal, until
from .studio import pixels, png, serving_studio
from .test_edit_image import edit

pytestmark = pytest.mark.service

SIZE = 64 * 48 * 3


def create(seed, **changes):
    asked = edit(png(64, 48, seed=seed), **changes)
    return job_pb2.CreateJobRequest(edit_image=asked)


@pytest.fixture
async def service():
    """Room for the inputs of two jobs, and a worker that prepares none until it is told."""
    async with serving_studio(input_budget=2 * SIZE, restart_backoff=0) as running:
        running.executor.gates[Lane.PREPARE].close()
        yield running
    assert blocks(running) == []


def blocks(service):
    prefixes = [decoder._prefix for decoder in service.server._gate.intake._media._all]
    return [path.name for prefix in prefixes for path in Path("/dev/shm").glob(f"{prefix}*")]


async def freed(service, size=0):
    await until(lambda: service.engine.inputs.size_bytes == size)
    assert len(blocks(service)) == size // SIZE


async def test_pixels_never_travel_through_the_pipe(service):
    first = (await service.jobs.CreateJob(create(1))).job.job_id
    second = (await service.jobs.CreateJob(create(2))).job.job_id
    assert service.engine.inputs.size_bytes == 2 * SIZE
    request = service.engine.jobs.get(second).request
    assert (request.inputs.images[0].data, len(blocks(service))) == (b"", 2)
    assert len(pickle.dumps(request)) < 4000
    service.executor.gates[Lane.PREPARE].open()
    for job_id, seed in ((first, 1), (second, 2)):
        await service.watch(job_id)
        (mine,) = (one for plan in service.executor.plans for one in plan.admit if one.id == job_id)
        assert mine.inputs.images[0].data == pixels(64, 48, seed=seed).tobytes()
    await freed(service)


async def test_a_full_budget_refuses_until_a_job_is_prepared_or_ends(service):
    ids = [(await service.jobs.CreateJob(create(seed))).job.job_id for seed in (1, 2)]
    error = await refusal(service.jobs.CreateJob(create(3)))
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "INPUTS_FULL")
    assert error.details["RetryInfo"].retry_delay.seconds == 1
    assert "--input-budget" in error.message
    await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=ids[1]))
    await freed(service, SIZE)
    third = (await service.jobs.CreateJob(create(3))).job.job_id
    service.executor.gates[Lane.PREPARE].let(1)
    await freed(service, SIZE)
    service.executor.gates[Lane.PREPARE].open()
    for job_id in (ids[0], third):
        await service.watch(job_id)
    await freed(service)


async def test_what_never_fits_is_refused_without_a_time(service):
    error = await refusal(service.jobs.CreateJob(job_pb2.CreateJobRequest(edit_image=edit(png(128, 96)))))
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "INPUTS_OVER_BUDGET")
    assert "RetryInfo" not in error.details
    await freed(service)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"strength": 3.0}, "INVALID_ARGUMENT"), ({"task": "TASK_INPAINT"}, "INVALID_ARGUMENT")]
)
async def test_a_refused_request_leaves_nothing(service, changes, reason):
    error = await refusal(service.jobs.CreateJob(create(1, **changes)))
    assert error.code == reason
    await freed(service)


async def test_the_same_request_twice_at_once_is_kept_once(service):
    both = await asyncio.gather(*(service.jobs.CreateJob(create(1, options={"request_id": "mine"})) for _ in range(2)))
    assert sorted(one.deduplicated for one in both) == [False, True]
    await freed(service, SIZE)
    await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=both[0].job.job_id))
    await freed(service)


async def test_a_job_that_goes_back_to_the_queue_has_its_inputs_again(service):
    job_id = (await service.jobs.CreateJob(create(1))).job.job_id
    await until(lambda: service.executor.plans)
    await service.executor.die()
    service.executor.gates[Lane.PREPARE].open()
    events = await service.watch(job_id)
    assert "retrying" in [event.WhichOneof("event") for event in events]
    admitted = [request for plan in service.executor.plans for request in plan.admit]
    assert [request.inputs.images[0].data for request in admitted] == [pixels(64, 48, seed=1).tobytes()] * 2
    await freed(service)


async def test_a_client_that_leaves_stops_the_decoding(service):
    await service.jobs.CreateJob(create(1))  # the process is there
    await freed(service, SIZE)
    large = edit(png(2000, 1500), width=32, height=16)
    call = service.generation.EditImage(large)
    reading = asyncio.ensure_future(call.read())
    reader = service.server._gate.intake._media
    await until(lambda: reader._idle.qsize() == 1)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: reader._idle.qsize() == 2)
    await freed(service, SIZE)
    assert len(service.engine.jobs) == 1


async def test_stopping_the_server_frees_what_waits():
    async with serving_studio() as service:
        service.executor.gates[Lane.PREPARE].close()
        await service.jobs.CreateJob(create(1))
        assert len(blocks(service)) == 1
    assert blocks(service) == []
    assert not any(decoder._process and decoder._process.alive for decoder in service.server._gate.intake._media._all)
