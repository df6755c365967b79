"""Both clients: edits, videos and sounds, and how their inputs travel."""

import asyncio

import pytest

from omni_grpc.client import AudioResult, ImageResult, JobStream, VideoResult, messages
from omni_grpc.client.media import INLINE_BYTES, media_input
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.request import Task
from omni_grpc.v1.artifact_pb2 import UploadAssetResponse
from omni_grpc.v1.media_pb2 import MediaInput
from tests.client.threaded import ThreadedStream
from tests.server.fake_executor import picture
from tests.server.studio import mp4, noise, pixels, png, serving_studio, studio, wav

pytestmark = pytest.mark.service


@pytest.fixture
async def service():
    async with serving_studio() as running:
        yield running


@pytest.fixture
async def client(kind, service):
    async with kind(f"127.0.0.1:{service.server.port}") as connected:
        yield connected


def awaitable(stream):
    """The stream of either client as one that can be waited for."""
    return ThreadedStream(stream) if isinstance(stream, JobStream) else stream


async def test_an_edit_from_a_path_bytes_and_a_picture(client, service, tmp_path):
    tmp_path.joinpath("a.png").write_bytes(png())
    mask = pixels(mode="L", seed=5)
    result = await client.edit_image("blue", images=[tmp_path / "a.png", png(seed=1)], mask=mask, strength=0.5, seed=7)
    assert isinstance(result, ImageResult)
    assert result.files == (picture(32, 16, 7, ImageFormat.PNG),)
    asked = service.executor.request
    assert (asked.task, asked.strength, result.effective.strength) == (Task.INPAINT, 0.5, 0.5)
    assert [image.data for image in asked.inputs.images] == [pixels().tobytes(), pixels(seed=1).tobytes()]
    assert asked.inputs.mask.data == mask.tobytes()
    again = await client.edit_image("blue", images=[result.images[0], str(tmp_path / "a.png")], task="image_edit")
    assert service.executor.request.inputs.images[0].data == result.images[0].tobytes()
    # an output of an earlier job is not sent back and forth
    await client.edit_image("blue", images=[again.artifacts[0]])
    assert service.executor.request.inputs.images[0].data == again.images[0].tobytes()


async def test_a_video_with_its_figures(client, service, tmp_path):
    result = await client.generate_video(
        "a ball", first_frame=png(), duration=1, output_fps=12, output_format="webm", seed=7, extra={"flow": 3}
    )
    assert isinstance(result, VideoResult)
    asked = service.executor.request
    assert (asked.task, asked.num_frames, asked.output_fps, asked.extra) == (Task.IMAGE_TO_VIDEO, 9, 12, {"flow": 3})
    (artifact,) = result.artifacts
    assert (artifact.mime_type, artifact.num_frames, artifact.fps) == ("video/webm", 9, 12)
    assert artifact.duration == pytest.approx(0.75)
    effective = result.effective
    assert (effective.num_frames, effective.fps, effective.output_fps) == (9, 8, 12)
    assert effective.output_format is VideoFormat.WEBM
    assert result.save(tmp_path / "a.webm") == [tmp_path / "a.webm"]
    assert tmp_path.joinpath("a.webm").read_bytes() == noise(7)
    with pytest.raises(InvalidArgument, match=r"use \.webm"):
        result.save(tmp_path / "a.mp4")


async def test_a_sound_with_its_figures(kind, tmp_path):
    checkpoint = studio(takes=frozenset({"duration", "start", "audio", "text", "strength"}))
    async with serving_studio(checkpoint) as service, kind(f"127.0.0.1:{service.server.port}") as client:
        result = await client.generate_audio(
            "rain",
            reference=wav(),
            start=1,
            end=3.5,
            text="la",
            sample_rate_hz=8000,
            output_format=AudioFormat.OPUS,
            seed=1,
        )
        asked = service.executor.request
    assert isinstance(result, AudioResult)
    assert (asked.start, asked.duration, asked.text, asked.inputs.given) == (1, 2.5, "la", ("audio",))
    assert (result.effective.sample_rate_hz, result.effective.duration) == (8000, 2.5)
    assert result.artifacts[0].sample_rate_hz == 8000
    assert result.effective.output_format is AudioFormat.OPUS
    assert result.save(tmp_path / "a.ogg") == [tmp_path / "a.ogg"]


async def test_events_of_a_video_and_a_cancel_by_leaving(client, service):
    async with awaitable(await client.stream_video("a ball", num_frames=5)) as stream:
        names = [event.WhichOneof("event") async for event in stream]
        assert (await stream.result()).artifacts[0].num_frames == 5
    assert names[0] == "queued"
    assert names.count("step_progress") == 2
    service.executor.gates[Lane.PREPARE].close()
    for opening in (client.stream_edit("blue", images=[png()]), client.stream_audio("rain")):
        async with awaitable(await opening) as stream:
            job = service.engine.jobs.get(stream.job_id)
        assert job.entries[-1].event.reason == "the client left the stream"


async def test_jobs_that_outlive_the_client(client, service):
    edit = await client.create_edit_job("blue", images=[png()])
    video = await client.create_video_job("a ball", source_video=mp4())
    audio = await client.create_audio_job("rain")
    kinds = [type(await client.watch_job(job.job_id).result()) for job in (edit, video, audio)]
    assert kinds == [ImageResult, VideoResult, AudioResult]


async def test_small_media_travel_inside_and_large_ones_are_uploaded(client, service):
    small, large = png(seed=1), png(1300, 1100)
    assert len(small) < INLINE_BYTES < len(large)
    await client.edit_image("blue", images=[small])
    assert service.engine.assets.size_bytes == 0
    await client.edit_image("blue", images=[large, small], width=32, height=16)
    assert len(await service.engine.storage.store.files.expired_assets(float("inf"), 9)) == 2
    images = service.executor.request.inputs.images
    assert [image.data for image in images] == [pixels(1300, 1100).tobytes(), pixels(seed=1).tobytes()]


async def test_an_upload_can_be_used_again(client, service, tmp_path):
    tmp_path.joinpath("a.mp4").write_bytes(mp4())
    stored = await client.upload(tmp_path / "a.mp4")
    assert (await service.engine.assets.use(stored.asset_id)).mime_type == "video/mp4"
    for _ in range(2):
        await client.generate_video("a ball", source_video=stored)
        assert service.executor.request.inputs.source_video.num_frames == 5
    with pytest.raises(TypeError):
        await client.upload("data:image/png;base64,AAAA")


async def test_a_full_store_is_an_error_of_the_call(kind):
    async with serving_studio(asset_budget=1000) as service, kind(f"127.0.0.1:{service.server.port}") as client:
        with pytest.raises(Exception, match="the store holds only 1000") as caught:
            await client.edit_image("blue", images=[png(1300, 1100)])
        assert caught.value.reason == "ASSET_TOO_LARGE"
        assert len(service.engine.jobs) == 0


async def test_an_upload_says_why_it_was_refused_each_time(kind):
    """Also where the refusal comes while the client still sends."""
    async with serving_studio(asset_budget=1000) as service, kind(f"127.0.0.1:{service.server.port}") as client:
        for _ in range(20):
            with pytest.raises(Exception, match="the store holds only 1000"):
                await client.upload(png(1300, 1100))


async def test_refusals_of_the_server_and_of_the_client(client, service, tmp_path):
    with pytest.raises(InvalidArgument, match=r"images\[0\]: is of an unknown type"):
        await client.edit_image("blue", images=[b"text"])
    with pytest.raises(InvalidArgument, match="num_frames, duration are both set"):
        await client.generate_video("a ball", num_frames=5, duration=1)
    with pytest.raises(FileNotFoundError):
        await client.edit_image("blue", images=[tmp_path / "none.png"])
    with pytest.raises(FailedPrecondition, match="does not support LAYERED"):
        await client.edit_image("blue", images=[png()], task=Task.LAYERED)
    assert len(service.engine.jobs) == 0


async def test_progress_is_shown(client, capsys):
    await client.generate_video("a ball", progress=True)
    await asyncio.sleep(0)
    assert "step 2/2" in capsys.readouterr().err


# --- without a server -------------------------------------------------------------------------------------------------


def test_what_media_may_be():
    assert media_input("data:image/png;base64,AA") == MediaInput(uri="data:image/png;base64,AA")
    assert media_input(bytearray(b"x")) == MediaInput(data=b"x")
    assert media_input(UploadAssetResponse(asset_id="a")) == MediaInput(asset_id="a")
    picture = media_input(pixels(mode="RGBA"))
    assert (picture.mime_type, picture.data[:4]) == ("image/png", b"\x89PNG")


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: messages.edit_request("m", "x", "a.png", {}), "images"),
        (lambda: messages.edit_request("m", "x", [7], {}), "images"),
        (lambda: messages.edit_request("m", "x", [], {"mask": 7}), "mask"),
        (lambda: messages.edit_request("m", "x", [], {"task": "paint"}), "task"),
        (lambda: messages.edit_request("m", "x", [], {"extra": [1]}), "sampling.extra"),
        (lambda: messages.edit_request("m", "x", [], {"loras": ["style"]}), "sampling.loras"),
        (lambda: messages.edit_request("m", "x", [], {"loras": {"style": "much"}}), "sampling.loras"),
        (lambda: messages.edit_request("m", "x", [], {"extra": {"a": object()}}), "sampling.extra"),
        (lambda: messages.video_request("m", "x", {"output_format": "png"}), "output_format"),
        (lambda: messages.video_request("m", "x", {"num_frames": -1}), "num_frames"),
        (lambda: messages.video_request("m", "x", {"reference_images": b"x"}), "reference_images"),
        (lambda: messages.audio_request("m", "x", {"duration": "long"}), "duration"),
        (lambda: messages.audio_request("m", "x", {"sample_rate": 0.5}), "sample_rate_hz"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_field(build, field):
    with pytest.raises(InvalidArgument) as caught:
        build()
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_unknown_option_is_a_type_error_with_the_nearest_name():
    with pytest.raises(TypeError, match="unknown option 'strenght'; did you mean 'strength'"):
        messages.edit_request("m", "x", [], {"strenght": 1})
    with pytest.raises(TypeError, match="unknown option 'width'"):
        messages.audio_request("m", "x", {"width": 1})
