"""EditImage: the images that a request brings along, the task that they stand for, and every refusal by name."""

import hashlib
import math

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.media import ImageFormat, Inputs
from omni_grpc.types.request import Task
from omni_grpc.v1 import generation_pb2, job_pb2, media_pb2, model_pb2

from .fake_executor import picture
from .service import kinds, refusal, until
from .studio import pixels, png, serving_studio, studio
from .test_assets import upload

pytestmark = pytest.mark.service


@pytest.fixture
async def service():
    async with serving_studio() as running:
        yield running


def edit(*images, **changes):
    """A request with images, each given as bytes or as the fields of a MediaInput."""
    inputs = [image if isinstance(image, dict) else {"data": image} for image in images]
    values = {"model": "toy", "prompt": "make it blue", "images": inputs, "sampling": {"seed": 7}}
    return generation_pb2.EditImageRequest(**(values | changes))


async def edited(service, request):
    return [message.event async for message in service.generation.EditImage(request)]


async def test_an_edit_gives_its_images_to_the_model_and_its_outputs_to_the_caller(service):
    events = await edited(service, edit(png(), png(64, 48, seed=1)))
    assert kinds(events)[0] == "queued"
    assert kinds(events)[-2:] == ["artifact_chunk", "completed"]
    asked = service.executor.request
    assert (asked.task, asked.prompt, asked.strength) == (Task.IMAGE_EDIT, "make it blue", 0.75)
    assert [(image.width, image.height, image.channels) for image in asked.inputs.images] == [(32, 16, 3), (64, 48, 3)]
    assert asked.inputs.images[0].data == pixels().tobytes()
    assert asked.inputs.images[1].data == pixels(64, 48, seed=1).tobytes()
    assert (asked.width, asked.height) == (32, 16), "as large as the first image"
    done = events[-1].completed
    assert events[-2].artifact_chunk.data == picture(32, 16, 7, ImageFormat.PNG)
    assert (done.effective.task, done.effective.strength) == (3, 0.75)
    assert done.effective.defaults_used["strength"] == "0.75"


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({}, Task.IMAGE_EDIT),
        ({"strength": 0.0}, Task.IMAGE_TO_IMAGE),
        ({"mask": {"data": png(mode="L")}, "strength": 0.5}, Task.INPAINT),
        ({"mask": {"data": png(mode="L")}, "task": "TASK_IMAGE_EDIT"}, Task.IMAGE_EDIT),
    ],
)
async def test_the_task_follows_from_the_inputs_unless_it_is_named(service, changes, task):
    await edited(service, edit(png(), **changes))
    assert service.executor.request.task is task
    assert service.executor.request.strength == changes.get("strength", 0.75)


async def test_a_mask_has_one_channel(service):
    await edited(service, edit(png(), mask={"data": png(mode="L", seed=3)}))
    mask = service.executor.request.inputs.mask
    assert (mask.channels, mask.data) == (1, pixels(mode="L", seed=3).tobytes())


async def test_what_was_converted_is_a_warning_of_the_job(service):
    events = await edited(service, edit(png(mode="RGBA")))
    for warnings in (events[1].started.warnings, events[-1].completed.warnings):
        assert [(warning.code, warning.field) for warning in warnings] == [("INPUT_CONVERTED", "images[0]")]
    create = await service.jobs.CreateJob(job_pb2.CreateJobRequest(edit_image=edit(png(mode="RGBA"))))
    assert [warning.code for warning in create.warnings] == ["INPUT_CONVERTED"]


async def test_an_image_comes_in_a_data_uri_an_asset_or_an_earlier_output(service):
    import base64

    text = base64.b64encode(png()).decode()
    stored = await upload(service, png(seed=2), "image/png")
    first = await edited(service, edit({"uri": f"data:image/png;base64,{text}"}, {"asset_id": stored.asset_id}))
    images = service.executor.request.inputs.images
    assert [image.data for image in images] == [pixels().tobytes(), pixels(seed=2).tobytes()]
    output = first[-1].completed.artifacts[0]
    await edited(service, edit({"asset_id": output.artifact_id}))
    assert (service.executor.request.inputs.images[0].width, output.width) == (32, 32)


async def test_the_sha256_is_checked(service):
    digest = hashlib.sha256(png()).digest()
    await edited(service, edit({"data": png(), "sha256": digest}))
    error = await refusal(service.generation.EditImage(edit({"data": png(seed=1), "sha256": digest})))
    assert (error.code, error.reason, error.fields) == ("INVALID_ARGUMENT", "INPUT_HASH_MISMATCH", ["images[0]"])


async def test_a_request_of_megabytes_is_read_like_a_small_one(service):
    large = png(700, 700)
    assert len(large) > 1 << 20
    await edited(service, edit(large, width=32, height=16))
    assert service.executor.request.inputs.images[0].data == pixels(700, 700).tobytes()


@pytest.mark.parametrize(
    ("request_", "field", "text"),
    [
        (edit(), "images", "is required for IMAGE_EDIT"),
        (edit(png(), png(), png()), "images", "takes at most 2"),
        (edit({}), "images[0]", "has no source"),
        (edit({"uri": ""}), "images[0].uri", "is empty"),
        (edit({"uri": "https://example.org/a.png"}), "images[0].uri", "--outbound-hosts example.org"),
        (edit({"uri": "file:///a.png"}), "images[0].uri", "only data URLs"),
        (edit({"data": b""}), "images[0]", "has no bytes"),
        (edit(png()[:200]), "images[0]", "cannot be read"),
        (edit({"data": png(), "mime_type": "image/jpeg"}), "images[0]", "its bytes are image/png"),
        (edit(png(), b"GIF89a nonsense"), "images[1]", "cannot be read"),
        (edit(png(), mask={"data": b"text"}), "mask", "of an unknown type"),
        (edit(png(), mask={"data": png(16, 16, mode="L")}), "mask", "is 16 x 16, but the first image is 32 x 16"),
        (edit(png(), task="TASK_INPAINT"), "mask", "is required for INPAINT"),
        (edit(png(), strength=math.nan), "strength", "nan is outside 0..1"),
        (edit(png(), output_format=77), "output_format", "77 is not supported"),
        (edit(png(), task=99), "task", "99 is not supported"),
        (edit(png(), prompt=" "), "prompt", "is empty"),
        (edit(png(), sampling={"seed": 1, "seeds": [2]}), "sampling.seed, sampling.seeds", "are both set"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_path(service, request_, field, text):
    error = await refusal(service.generation.EditImage(request_))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert text in error.details["BadRequest"].field_violations[0].description
    assert service.executor.plans == []


async def test_every_broken_input_is_named_at_once(service):
    error = await refusal(service.generation.EditImage(edit(b"text", png(), mask={"data": b"text"})))
    assert error.fields == ["images[0]", "mask"]


async def test_an_unknown_asset_is_not_found(service):
    error = await refusal(service.generation.EditImage(edit({"asset_id": "asset-1"})))
    assert (error.code, error.reason) == ("NOT_FOUND", "ASSET_NOT_FOUND")
    assert "images[0].asset_id" in error.message
    assert error.details["ResourceInfo"].resource_name == "asset-1"


async def test_inputs_are_limited_alone_and_together():
    async with serving_studio(max_input_bytes=3000, max_input_pixels=1000, max_input_video_pixels=900) as service:
        for request, reason in (
            (edit(png(64, 48)), "INPUT_TOO_LARGE"),
            (edit(png(40, 40, mode="1")), "INPUT_TOO_LARGE"),
            (edit(png(), png(seed=1)), "INPUTS_TOO_LARGE"),
            (edit(png(32, 16, mode="1"), png(32, 16, mode="1")), "INPUTS_TOO_LARGE"),
        ):
            error = await refusal(service.generation.EditImage(request))
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", reason)
        await edited(service, edit(png()))


async def test_a_task_that_the_model_lacks_is_refused_before_its_media_are_looked_at():
    async with serving_studio(studio(tasks=(Task.IMAGE_EDIT,))) as service:
        error = await refusal(service.generation.EditImage(edit(b"text", strength=0.5)))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "TASK_NOT_SUPPORTED")
    assert error.metadata == {"task": "IMAGE_TO_IMAGE", "tasks": "IMAGE_EDIT"}


async def test_what_the_model_does_not_take_is_refused_even_where_it_is_zero():
    async with serving_studio(studio(takes=frozenset({"images"}))) as service:
        request = edit(png(), strength=0.0, sampling={"extra": {"shine": 1}})
        error = await refusal(service.generation.EditImage(request))
        assert error.fields == ["strength", "sampling.extra"]
        found = await service.models.GetModel(model_pb2.GetModelRequest(model="toy"))
    assert {"strength", "mask", "source_video", "reference"} <= {entry.feature for entry in found.model.refusals}


async def test_a_job_of_an_edit_is_made_once_for_its_request_id(service):
    service.executor.gates[Lane.PREPARE].close()
    asked = edit(png(), options={"request_id": "mine"})
    create = job_pb2.CreateJobRequest(edit_image=asked)
    first, again = await service.jobs.CreateJob(create), await service.jobs.CreateJob(create)
    assert (again.job.job_id, again.deduplicated) == (first.job.job_id, True)
    asked.images[0].data = png(seed=9)
    error = await refusal(service.jobs.CreateJob(job_pb2.CreateJobRequest(edit_image=asked)))
    assert (error.code, error.reason) == ("ABORTED", "REQUEST_ID_REUSED")


async def test_a_job_that_has_ended_keeps_no_pixels(service):
    events = await edited(service, edit(png()))
    job = service.engine.jobs.get(events[0].job_id)
    await until(lambda: job.state.terminal)
    assert job.request.inputs == Inputs()


async def test_parameters_of_one_model_arrive_as_json_has_them(service):
    extra = {"max_sequence_length": 256, "eta": 0.5, "names": ["a", 2], "deep": {"on": True, "n": 3}, "none": None}
    await edited(service, edit(png(), sampling={"extra": extra}))
    arrived = service.executor.request.extra
    assert arrived == extra
    assert [type(arrived["max_sequence_length"]), type(arrived["names"][1])] == [int, int]


def test_a_media_input_has_no_field_that_is_not_read():
    names = {"data", "asset_id", "uri", "mime_type", "sha256"}
    assert set(media_pb2.MediaInput.DESCRIPTOR.fields_by_name) == names
