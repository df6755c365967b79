"""Pictures of half-made outputs on the streams of their job."""

import asyncio

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.media import ImageFormat
from omni_grpc.v1 import job_pb2

from .fake_executor import picture
from .service import Service, image

LATENT_RGB = {"method": "PREVIEW_METHOD_LATENT_RGB", "max_edge_px": 32, "format": "IMAGE_FORMAT_PNG"}


async def in_lockstep(service: Service, call):
    """Every event of a stream, each step let through when the event before it has come."""
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    events = []
    async for message in call:
        events.append(message.event)
        if message.event.WhichOneof("event") in ("encode_done", "step_progress"):
            gate.let(1)
    return events


def pictures(events) -> dict[int, list[bytes]]:
    """Step -> the previews that came with it, for the steps that have some."""
    steps = (event.step_progress for event in events if event.HasField("step_progress"))
    return {step.step: [preview.data for preview in step.previews] for step in steps if step.previews}


def made(step: int, *outputs: int) -> list[bytes]:
    return [picture(32, 32, 1000 * step + i, ImageFormat.PNG) for i in outputs]


async def test_previews_of_every_output_come_at_the_rate_asked(service):
    request = image(sampling={"steps": 7, "num_outputs": 2}, options={"preview": LATENT_RGB | {"every_steps": 3}})
    events = await in_lockstep(service, service.generation.GenerateImage(request))
    assert pictures(events) == {3: made(3, 0, 1), 6: made(6, 0, 1)}
    (step,) = (event.step_progress for event in events if event.step_progress.step == 6)
    shapes = [(preview.index, preview.mime_type, preview.width, preview.height) for preview in step.previews]
    assert shapes == [(0, "image/png", 32, 32), (1, "image/png", 32, 32)]


async def test_without_being_asked_for_there_are_none(service):
    for preview in ({}, {"method": "PREVIEW_METHOD_NONE"}):
        request = image(options={"preview": preview})
        assert pictures(await in_lockstep(service, service.generation.GenerateImage(request))) == {}


async def test_only_the_newest_is_kept_for_those_who_come_later(service):
    job = await service.finished(sampling={"steps": 5}, options={"preview": LATENT_RGB | {"every_steps": 2}})
    whole = await service.watch(job.job_id)
    assert pictures(whole) == {4: made(4, 0)}
    (seq,) = (event.seq for event in whole if event.step_progress.previews)
    assert pictures(await service.watch(job.job_id, after_seq=seq - 1)) == {4: made(4, 0)}
    assert pictures(await service.watch(job.job_id, after_seq=seq)) == {}


@pytest.mark.parametrize("omit", [False, True])
async def test_a_watcher_can_leave_them_out(service, omit):
    service.executor.gates[Lane.PREPARE].close()
    job = await service.create(options={"preview": LATENT_RGB})
    one = job_pb2.WatchJobRequest(job_id=job.job_id, omit_previews=omit)
    many = job_pb2.WatchJobsRequest(job_ids=[job.job_id], omit_previews=omit)
    watching = asyncio.create_task(in_lockstep(service, service.jobs.WatchJob(one)))
    listening = asyncio.create_task(read(service.jobs.WatchJobs(many)))
    service.executor.gates[Lane.PREPARE].open()
    for events in await asyncio.gather(watching, listening):
        assert pictures(events) == ({} if omit else {step: made(step, 0) for step in (1, 2, 3)})


async def read(call):
    return [message.event async for message in call]


async def test_a_preview_whose_step_was_left_out_comes_once_with_the_next_step(service):
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    options = {"preview": LATENT_RGB | {"every_steps": 2}, "min_progress_interval": {"nanos": 50_000_000}}
    call = aiter(service.generation.GenerateImage(image(sampling={"steps": 9}, options=options)))
    while not (await anext(call)).event.HasField("encode_done"):
        pass
    gate.let(3)
    seen = [(await anext(call)).event for _ in range(2)]
    for _ in range(2):
        gate.let(1)
        seen.append((await anext(call)).event)
    assert [(event.step_progress.step, event.coalesced) for event in seen] == [(1, 0), (3, 1), (4, 0), (5, 0)]
    assert pictures(seen) == {3: made(2, 0), 4: made(4, 0)}
