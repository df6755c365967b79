"""GenerateVideo: its inputs, its length, and every refusal by name."""

import dataclasses
import math

import pytest

from omni_grpc.types.diffusers_spec import opaque_spec
from omni_grpc.types.media import VideoFormat
from omni_grpc.types.request import Task
from omni_grpc.types.spec import Checkpoint
from omni_grpc.v1 import generation_pb2, job_pb2, model_pb2

from .service import kinds, refusal
from .studio import mp4, noise, pixels, png, serving_studio, studio, wav
from .test_assets import upload

pytestmark = pytest.mark.service


@pytest.fixture
async def service():
    async with serving_studio() as running:
        yield running


def video(**changes):
    values = {"model": "toy", "prompt": "a red circle that rolls", "sampling": {"seed": 7}}
    return generation_pb2.GenerateVideoRequest(**(values | changes))


async def made(service, request):
    return [message.event async for message in service.generation.GenerateVideo(request)]


async def test_a_video_and_all_that_is_to_know_of_it(service):
    events = await made(service, video(num_frames=17, fps=16, output_fps=32, output_format="VIDEO_FORMAT_WEBM"))
    assert kinds(events)[-2:] == ["artifact_chunk", "completed"]
    assert events[-2].artifact_chunk.data == noise(7)
    asked = service.executor.request
    assert (asked.task, asked.num_frames, asked.fps, asked.output_fps) == (Task.TEXT_TO_VIDEO, 17, 16, 32)
    assert asked.output_format is VideoFormat.WEBM
    assert events[1].started.num_frames == 17
    done = events[-1].completed
    (artifact,) = done.artifacts
    assert (artifact.mime_type, artifact.num_frames, artifact.fps) == ("video/webm", 17, 32)
    assert artifact.duration.ToTimedelta().total_seconds() == pytest.approx(17 / 32)
    effective = done.effective
    assert (effective.num_frames, effective.fps, effective.output_fps, effective.video_format) == (17, 16, 32, 2)
    assert (effective.task, effective.duration) == (6, artifact.duration)


async def test_unset_is_the_models_default(service):
    events = await made(service, video())
    effective = events[-1].completed.effective
    assert (effective.num_frames, effective.fps, effective.video_format) == (9, 8, 1)
    assert effective.defaults_used["num_frames"] == "9"


@pytest.mark.parametrize(("follows", "frames"), [(False, 9), (True, 5)])
async def test_a_source_video_says_what_is_unset(follows, frames):
    defaults = dataclasses.replace(studio().defaults, frames_of_source=follows)
    async with serving_studio(studio(defaults=lambda configs: defaults)) as service:
        source = {"data": mp4(8, 48, 32, fps=10)}
        events = await made(service, video(source_video=source))
        asked = service.executor.request
        assert (asked.width, asked.height, asked.fps, asked.num_frames) == (48, 32, 10, frames)
        assert events[-1].completed.effective.defaults_used["fps"] == "10.0"
        # and a playing time is counted with its rate
        await made(service, video(source_video=source, duration={"nanos": 500_000_000}))
        assert service.executor.request.num_frames == 5
        await made(service, video(source_video=source, width=64, height=16, fps=16, num_frames=13))
        asked = service.executor.request
        assert (asked.width, asked.height, asked.fps, asked.num_frames) == (64, 16, 16, 13)


@pytest.mark.parametrize(
    ("seconds", "fps", "frames", "rounded"),
    [(2.125, None, 17, False), (2, None, 17, True), (1, 13, 13, False), (1, 16, 17, True), (0.01, None, 1, True)],
)
async def test_a_playing_time_is_the_nearest_legal_number_of_frames(service, seconds, fps, frames, rounded):
    length = {"duration": {"seconds": int(seconds), "nanos": round(seconds % 1 * 1e9)}}
    events = await made(service, video(**length, **({"fps": fps} if fps else {})))
    assert service.executor.request.num_frames == frames
    assert service.executor.request.duration is None
    done = events[-1].completed
    assert done.effective.num_frames == frames
    warnings = {warning.code: warning for warning in done.warnings}
    assert ("DURATION_ROUNDED" in warnings) is rounded
    if rounded:
        assert warnings["DURATION_ROUNDED"].applied == f"{frames / (fps or 8):g} s"


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"num_frames": 16}, "num_frames", "is not a multiple of 4 plus 1; nearest valid value: 17"),
        ({"num_frames": 0}, "num_frames", "outside 1..81; nearest valid value: 1"),
        ({"num_frames": 1000}, "num_frames", "nearest valid value: 81"),
        ({"duration": {"seconds": 11}}, "duration", "more than 81 frames; nearest valid value: 10.125"),
        ({"duration": {"seconds": -1}}, "duration", "is negative"),
        ({"duration": {}}, "duration", "0 is outside 0.01.."),
        ({"fps": 0.0}, "fps", "0 is outside 1..240"),
        ({"output_fps": math.inf}, "output_fps", "inf is outside"),
        ({"with_audio": False}, "with_audio", "leave it unset"),
        ({"with_audio": True, "task": "TASK_TEXT_TO_VIDEO"}, "with_audio", "does not go with TEXT_TO_VIDEO"),
        ({"task": "TASK_VIDEO_TO_VIDEO"}, "source_video", "is required"),
        ({"task": "TASK_AUDIO_TO_VIDEO"}, "audio", "is required"),
        ({"task": "TASK_IMAGE_TO_VIDEO"}, "first_frame", "is required"),
        ({"source_video": {"data": png()}}, "source_video", "is image/png"),
        ({"source_video": {"data": mp4()[:300]}}, "source_video", "cannot be read"),
        ({"first_frame": {"data": mp4()}}, "first_frame", "is video/mp4"),
        ({"first_frame": {"data": png()}, "reference_images": [{}]}, "reference_images[0]", "has no source"),
        ({"audio": {"data": png()}}, "audio", "is image/png"),
        ({"output_format": 9}, "output_format", "9 is not supported"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_path(service, changes, field, text):
    for call in (
        service.generation.GenerateVideo(video(**changes)),
        service.jobs.CreateJob(job_pb2.CreateJobRequest(generate_video=video(**changes))),
    ):
        error = await refusal(call)
        assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
        assert text in error.details["BadRequest"].field_violations[0].description
    assert service.executor.plans == []


async def test_a_playing_time_needs_a_rate():
    from omni_grpc.types.request import Guidance
    from omni_grpc.types.spec import Defaults

    without = studio(defaults=lambda configs: Defaults(width=64, height=32, steps=2, guidance=Guidance()))
    async with serving_studio(without) as service:
        error = await refusal(service.generation.GenerateVideo(video(duration={"seconds": 1})))
        assert error.fields == ["duration"]
        assert "needs fps" in error.message
        await made(service, video(duration={"seconds": 1}, fps=9))
        assert service.executor.request.num_frames == 9


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({"first_frame": {"data": png()}}, Task.IMAGE_TO_VIDEO),
        ({"first_frame": {"data": png()}, "last_frame": {"data": png(seed=1)}}, Task.IMAGE_TO_VIDEO),
        ({"source_video": {"data": mp4()}, "strength": 0.5}, Task.VIDEO_TO_VIDEO),
        ({"source_video": {"data": mp4()}, "mask_video": {"data": mp4()}}, Task.VIDEO_EDIT),
        ({"audio": {"data": wav()}, "first_frame": {"data": png()}}, Task.AUDIO_TO_VIDEO),
        ({"with_audio": True}, Task.TEXT_TO_AUDIO_VIDEO),
    ],
)
async def test_each_input_reaches_the_model_decoded(service, changes, task):
    await made(service, video(**changes))
    asked = service.executor.request
    given = {name for name in changes if name not in ("strength", "with_audio")}
    assert (asked.task, set(asked.inputs.given)) == (task, given)
    if "first_frame" in given:
        assert asked.inputs.first_frame.data == pixels().tobytes()
        assert (asked.width, asked.height) == (32, 16)
    if "last_frame" in given:
        assert asked.inputs.last_frame.data == pixels(seed=1).tobytes()
    for name in given & {"source_video", "mask_video"}:
        found = getattr(asked.inputs, name)
        assert (found.num_frames, found.fps, found.width, found.height) == (5, 10, 32, 16)
        levels = [found.data[index * 32 * 16 * 3] for index in range(5)]
        assert levels == pytest.approx([0, 40, 80, 120, 160], abs=6)
    if "audio" in given:
        assert (asked.inputs.audio.sample_rate, asked.inputs.audio.channels) == (16_000, 1)


async def test_a_video_may_be_uploaded_and_used_twice(service):
    stored = await upload(service, mp4(), "video/mp4")
    for _ in range(2):
        await made(service, video(source_video={"asset_id": stored.asset_id}))
        assert service.executor.request.inputs.source_video.num_frames == 5


# --- what the model says ----------------------------------------------------------------------------------------------


async def test_a_model_tells_what_its_videos_may_be(service):
    found = (await service.models.GetModel(model_pb2.GetModelRequest(model="toy"))).model
    limits = found.limits
    assert (limits.min_frames, limits.max_frames, limits.frame_multiple, limits.frame_offset) == (1, 81, 4, 1)
    assert (limits.default_frames, limits.default_fps, limits.fps.max) == (9, 8, 240)
    assert (limits.max_input_images, limits.strength.max, limits.max_audio.seconds) == (2, 1, 30)
    assert [len(formats) for formats in (found.image_formats, found.video_formats, found.audio_formats)] == [4, 3, 4]
    refused = {entry.feature for entry in found.refusals}
    assert {"interpolation", "step_batching", "sampling.loras"} <= refused
    assert not refused & {"images", "layers", "strength", "duration", "fps", "reference", "sampling.extra"}


async def test_a_model_that_only_loading_can_describe_is_loading_without_limits():
    async with serving_studio() as service:
        service.engine.checkpoint = Checkpoint(
            name="toy", path=service.engine.checkpoint.path, spec=opaque_spec("AnyPipeline"), configs={}
        )
        service.engine._enter(type(service.engine.state).STARTING)
        (found,) = (await service.models.ListModels(model_pb2.ListModelsRequest())).models
        assert (found.state, found.HasField("limits"), found.HasField("defaults")) == (2, False, False)
        assert list(found.tasks) == []
        error = await refusal(service.generation.GenerateVideo(video()))
        assert (error.code, error.reason) == ("UNAVAILABLE", "MODEL_LOADING")
        # what closing it needs
        service.engine.checkpoint = studio()
