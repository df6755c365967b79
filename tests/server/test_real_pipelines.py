"""Each task end to end: a tiny diffusers pipeline behind the real server, asked by the real client, and offline."""

import contextlib
import io

import av
import PIL.Image
import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus, pipeline_qwenimage_layered

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.client import AsyncClient
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, LocalExecutor
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.request import Task
from omni_grpc.v1 import sampling_pb2

from .studio import mp4, pixels, png

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny checkpoint by the name of its builder."""
    from tools.tiny_checkpoints import BUILDERS

    return lambda name: BUILDERS[name](tmp_path_factory.mktemp("tiny") / name)


@contextlib.asynccontextmanager
async def served(folder):
    """A client of a server with this checkpoint. The model's limits are known once it is loaded."""
    config = EngineConfig.from_settings(
        model=str(folder), port=0, device="cpu", cpu_threads=1, diffusion_load_format="diffusers"
    )
    checkpoint = open_checkpoint(folder, name="tiny", load_format="diffusers")
    engine = Engine(config, checkpoint, LocalExecutor(config, checkpoint))
    server = Server(Gate(Fleet.of(engine)), config)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            yield client
    finally:
        await server.stop()


def frames_of(data):
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        return float(stream.average_rate), [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]


def probe(data):
    """What ffprobe -count_frames says of the first video stream."""
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        frames = sum(1 for _ in file.decode(stream))
        about = {"width": stream.width, "height": stream.height, "rate": float(stream.average_rate), "frames": frames}
        return about | {"duration": float(stream.duration * stream.time_base)}


async def test_an_image_is_edited_with_a_strength(tiny):
    folder = tiny("stable_diffusion_img2img")
    asked = {"images": [png(64, 64, mode="RGBA")], "strength": 0.5, "steps": 4, "seed": 3}
    async with served(folder) as client:
        (model,) = await client.list_models()
        assert (list(model.tasks), model.limits.strength.max) == ([2], 1)
        result = await client.edit_image("a red cat", **asked)
        with pytest.raises(Exception, match="does not support INPAINT"):
            await client.edit_image("a red cat", images=asked["images"], mask=png(64, 64, mode="L"))
    assert [image.size for image in result.images] == [(64, 64)]
    # the scheduler of Stable Diffusion takes one step more than it is asked for
    assert (result.effective.strength, result.effective.steps, result.stats.steps_run) == (0.5, 3, 3)
    assert "INPUT_CONVERTED" in {warning.code for warning in result.warnings}
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        here = omni.edit_image("a red cat", **asked)
    assert here.files == result.files
    assert (here.effective.strength, [warning.code for warning in here.warnings]) == (
        0.5,
        [warning.code for warning in result.warnings],
    )


async def test_one_checkpoint_makes_edits_and_inpaints(tiny):
    folder, picture, mask = tiny("stable_diffusion"), png(64, 64), png(64, 64, mode="L")
    small = {"width": 64, "height": 64, "steps": 2, "seed": 3}
    async with served(folder) as client:
        (model,) = await client.list_models()
        assert [Task(sampling_pb2.Task.Name(task).removeprefix("TASK_")) for task in model.tasks] == [
            Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT,
        ]  # fmt: skip
        assert (model.pipeline, model.limits.max_input_images, model.limits.strength.max) == (
            "StableDiffusionPipeline", 1, 1,
        )  # fmt: skip
        refusals = {refusal.feature for refusal in model.refusals}
        assert not refusals & {"images", "mask", "strength"}
        made = await client.generate_image("a cat", **small)
        varied = await client.edit_image("a cat", images=[picture], strength=0.5, steps=4, seed=3)
        filled = await client.edit_image("a cat", images=[picture], mask=mask, steps=2, seed=3)
        again = await client.generate_image("a cat", **small)
        refusal = "IMAGE_EDIT; supported tasks: TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT"
        with pytest.raises(FailedPrecondition, match=refusal):
            await client.edit_image("a cat", images=[picture])
    assert again.files == made.files
    assert (varied.effective.strength, varied.stats.steps_run, filled.effective.strength) == (0.5, 3, 1.0)
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        assert omni.edit_image("a cat", images=[picture], strength=0.5, steps=4, seed=3).files == varied.files
        assert omni.edit_image("a cat", images=[picture], mask=mask, steps=2, seed=3).files == filled.files


async def test_an_image_is_taken_apart_into_layers(tiny, monkeypatch):
    dimensions = pipeline_qwenimage_layered.calculate_dimensions
    monkeypatch.setattr(
        pipeline_qwenimage_layered, "calculate_dimensions", lambda area, ratio: dimensions(area / 100, ratio)
    )
    folder, picture = tiny("qwen_image_layered"), png(64, 64, mode="RGBA")
    asked = {"images": [picture], "layers": 2, "num_outputs": 2, "steps": 2, "seed": 3}
    async with served(folder) as client:
        result = await client.edit_image("a cat before a wall", **asked)
        with pytest.raises(InvalidArgument, match=r"layers: 65 is outside 1\.\.64"):
            await client.edit_image("a cat", **{**asked, "layers": 65})
    assert [(one.index, one.layer, one.seed) for one in result.artifacts] == [
        (0, 0, 3),
        (0, 1, 3),
        (1, 0, 4),
        (1, 1, 4),
    ]
    assert len({artifact.artifact_id for artifact in result.artifacts}) == 4
    assert all(artifact.has_alpha for artifact in result.artifacts)
    assert [(image.mode, image.size) for image in result.images] == [("RGBA", (64, 64))] * 4
    assert (result.effective.layers, result.seeds) == (2, (3, 3, 4, 4))
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        here = omni.edit_image("a cat before a wall", **asked)
    assert here.files == result.files
    assert [artifact.layer for artifact in here.artifacts] == [0, 1, 0, 1]


async def test_two_images_are_edited_together(tiny, monkeypatch):
    for size in ("VAE_IMAGE_SIZE", "CONDITION_IMAGE_SIZE"):
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, size, 64 * 64)
    folder = tiny("qwen_image_edit_plus")
    images = [png(64, 48), png(96, 64, seed=1)]
    asked = {"negative_prompt": " ", "true_cfg_scale": 3.0, "steps": 2, "seed": 3}
    async with served(folder) as client:
        (model,) = await client.list_models()
        assert model.limits.max_input_images == 10
        both = await client.edit_image("put the second into the first", images=images, **asked)
        turned = await client.edit_image("put the second into the first", images=images[::-1], **asked)
        with pytest.raises(Exception, match="takes at most 10"):
            await client.edit_image("a cat", images=images * 6, **asked)
    # as large as the first
    assert [image.size for image in (*both.images, *turned.images)] == [(64, 48), (96, 64)]
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        here = omni.edit_image("put the second into the first", images=images, **asked)
        alone = omni.edit_image("put the second into the first", images=images[:1], **asked)
    assert here.files == both.files
    assert alone.files != both.files


async def test_an_inpaint_depends_on_its_mask(tiny):
    mask, other = PIL.Image.new("L", (64, 64), 0), PIL.Image.new("L", (64, 64), 255)
    mask.paste(255, (0, 0, 64, 32))
    async with served(tiny("stable_diffusion_inpaint")) as client:

        async def inpainted(mask):
            result = await client.edit_image(
                "a cat", images=[pixels(64, 64)], mask=mask, steps=2, seed=1, output_format="raw_rgb8"
            )
            assert result.effective.output_format is ImageFormat.RAW_RGB8
            return result.files[0]

        first = await inpainted(mask)
        assert len(first) == 64 * 64 * 3
        assert await inpainted(other) != first
        assert await inpainted(mask) == first


async def test_a_video_from_its_first_frame_is_as_long_as_asked(tiny):
    folder = tiny("wan_i2v")
    async with served(folder) as client:
        result = await client.generate_video(
            "a ball", first_frame=png(32, 32), width=32, height=32, duration=0.5, output_fps=10, steps=2, seed=1
        )
        with pytest.raises(Exception, match="does not support VIDEO_TO_VIDEO"):
            await client.generate_video("a ball", source_video=mp4())
    (artifact,) = result.artifacts
    rate, frames = frames_of(result.files[0])
    assert result.effective.output_format is VideoFormat.MP4
    assert (artifact.num_frames, artifact.fps) == (len(frames), rate) == (result.effective.num_frames, 10)
    assert (len(frames) - 1) % 4 == 0
    assert artifact.duration == pytest.approx(len(frames) / 10)
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        here = omni.generate_video(
            "a ball", first_frame=pixels(32, 32), width=32, height=32, num_frames=len(frames), output_fps=10, steps=2,
            seed=1,
        )  # fmt: skip
    assert here.effective.num_frames == len(frames)
    assert here.files == result.files


async def test_a_video_from_an_uploaded_video_has_its_size_rate_and_length(tiny, tmp_path):
    folder = tiny("wan_v2v")
    source = tmp_path / "source.mp4"
    source.write_bytes(mp4(10, 64, 32, fps=10))
    async with served(folder) as client:
        (model,) = await client.list_models()
        assert "source_video" not in {refusal.feature for refusal in model.refusals}
        asked = {"source_video": await client.upload(source), "strength": 0.5, "steps": 4, "seed": 1}
        result = await client.generate_video("a ball", **asked)
    (artifact,) = result.artifacts
    video = probe(result.files[0])
    # a latent frame holds four, after the first: the last of the ten makes no whole one
    assert video == {"width": 64, "height": 32, "rate": 10.0, "frames": 9, "duration": 0.9}
    assert (artifact.width, artifact.height, artifact.num_frames, artifact.fps) == (64, 32, 9, 10)
    assert (result.effective.num_frames, result.effective.output_fps, result.effective.strength) == (9, 10, 0.5)
    assert result.effective.defaults_used["output_fps"] == "10.0"
    warnings = {warning.code: warning for warning in result.warnings}
    assert (warnings["SOURCE_TRIMMED"].requested, warnings["SOURCE_TRIMMED"].applied) == ("10", "9")
    assert result.stats.steps_run == 2
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        here = omni.generate_video("a ball", source_video=source, strength=0.5, steps=4, seed=1)
    assert here.files == result.files


async def test_a_video_comes_with_its_sound(tiny):
    async with served(tiny("ltx2")) as client:
        asked = {"width": 64, "height": 64, "num_frames": 9, "steps": 2, "seed": 1}
        stream = await client.stream_video("rain", task=Task.TEXT_TO_AUDIO_VIDEO, **asked)
        events = [event async for event in stream]
        result = await stream.result()
        silent = await client.generate_video("rain", **asked)
    steps = [event.step_progress for event in events if event.HasField("step_progress")]
    assert [(step.step, step.total_steps) for step in steps] == [(1, 2), (2, 2)]
    (artifact,) = result.artifacts
    with av.open(io.BytesIO(result.files[0])) as file:
        assert [stream.type for stream in file.streams] == ["video", "audio"]
        assert (artifact.sample_rate_hz, file.streams.audio[0].rate) == (8000, 8000)
    assert probe(result.files[0]) == {"width": 64, "height": 64, "rate": 24.0, "frames": 9, "duration": 0.375}
    # where nobody asks, it is as the model does it
    assert silent.files == result.files


async def test_a_sound_is_as_long_as_asked(tiny):
    folder = tiny("stable_audio")
    async with served(folder) as client:
        (model,) = await client.list_models()
        longest = model.limits.max_audio.ToTimedelta().total_seconds()
        seconds = min(longest, 1.0) / 2
        result = await client.generate_audio("rain", duration=seconds, steps=2, seed=1, output_format="flac")
    (artifact,) = result.artifacts
    with av.open(io.BytesIO(result.files[0])) as file:
        stream = file.streams.audio[0]
        samples = sum(frame.samples for frame in file.decode(stream))
        assert stream.rate == artifact.sample_rate_hz
    assert result.effective.output_format is AudioFormat.FLAC
    assert artifact.duration == pytest.approx(samples / artifact.sample_rate_hz, rel=1e-3)
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        assert omni.checkpoint.spec.tasks == (Task.TEXT_TO_AUDIO,)
        here = omni.generate_audio("rain", duration=seconds, steps=2, seed=1, output_format=AudioFormat.FLAC)
    assert here.artifacts[0].duration == artifact.duration
    assert here.files == result.files
