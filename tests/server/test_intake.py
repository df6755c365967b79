"""What can be refused without a look at the media is refused before they are decoded: here nobody could decode them."""

import asyncio

import pytest

from omni_grpc.engine import EngineState
from omni_grpc.engine.scheduler import Lane

from .service import refusal, until
from .studio import png, serving_studio
from .test_edit_image import edit

pytestmark = pytest.mark.service

BROKEN = b"no picture"


async def refused(service, request):
    error = await refusal(service.generation.EditImage(request))
    return error.code, error.reason


async def test_media_that_cannot_be_decoded_are_refused_when_nothing_else_is_wrong():
    async with serving_studio() as service:
        assert await refused(service, edit(BROKEN)) == ("INVALID_ARGUMENT", "INPUT_UNREADABLE")


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"sampling": {"steps": 10_000}}, ["sampling.steps"]),
        ({"width": 17}, ["width"]),
        ({"images": [{"data": BROKEN}] * 3}, ["images"]),
        ({"task": "TASK_INPAINT"}, ["mask"]),
        ({"mask": {"data": BROKEN}, "width": 17}, ["width"]),
    ],
)
async def test_rules_that_need_no_media_come_before_them(changes, fields):
    async with serving_studio() as service:
        error = await refusal(service.generation.EditImage(edit(BROKEN, **changes)))
        assert (error.reason, error.fields) == ("INVALID_ARGUMENT", fields)


async def test_rules_about_what_is_in_the_media_still_hold():
    async with serving_studio() as service:
        error = await refusal(service.generation.EditImage(edit(png(), mask={"data": png(64, 48, mode="L")})))
        assert (error.reason, error.fields) == ("INVALID_ARGUMENT", ["mask"])


async def test_a_full_queue_comes_before_the_media():
    async with serving_studio(max_queue=1) as service:
        service.executor.gates[Lane.PREPARE].close()
        calls = [service.generation.EditImage(edit(png())) for _ in range(2)]
        waiting = [asyncio.ensure_future(call.read()) for call in calls]
        await until(lambda: service.engine.stats().queued == 1)
        assert await refused(service, edit(BROKEN)) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_draining_server_refuses_before_the_media():
    async with serving_studio() as service:
        service.executor.gates[Lane.PREPARE].close()
        call = service.generation.EditImage(edit(png()))
        await call.read()
        stopping = asyncio.create_task(service.server.stop(drain=600))
        await until(lambda: service.engine.state is EngineState.DRAINING)
        assert await refused(service, edit(BROKEN)) == ("UNAVAILABLE", "ENGINE_DRAINING")
        service.executor.gates[Lane.PREPARE].open()
        await stopping


async def test_a_request_id_of_another_request_comes_before_the_media():
    async with serving_studio() as service:
        await service.generation.EditImage(edit(png(), options={"request_id": "a"})).read()
        assert await refused(service, edit(BROKEN, options={"request_id": "a"})) == ("ABORTED", "REQUEST_ID_REUSED")
