"""`omni-grpc edit`, `video` and `audio` against a server."""

import json

import pytest

from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Task
from tests.server.fake_executor import picture
from tests.server.studio import mp4, noise, pixels, png, serving_studio, studio, wav

pytestmark = pytest.mark.service


@pytest.fixture
async def service():
    async with serving_studio() as running:
        yield running


@pytest.fixture
def files(tmp_path):
    for name, data in {"a.png": png(), "b.png": png(seed=1), "m.png": png(mode="L"), "a.mp4": mp4()}.items():
        tmp_path.joinpath(name).write_bytes(data)
    return tmp_path


async def test_edit(run, server, service, files):
    out = files / "out.webp"
    done = await run(
        "edit", "blue", "--image", files / "a.png", "--image", files / "b.png", "--mask", files / "m.png",
        "--strength", 0.5, "--out", out, *server, "--seed", 7, "--extra", "eta=0.5", "--extra", 'style="bold"',
        "--no-metadata",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.startswith(f"{out}  32 x 16  seed 7  2 steps  ")
    assert out.read_bytes() == picture(32, 16, 7, ImageFormat.WEBP)
    asked = service.executor.request
    assert (asked.task, asked.strength, asked.extra) == (Task.INPAINT, 0.5, {"eta": 0.5, "style": "bold"})
    assert [image.data for image in asked.inputs.images] == [pixels().tobytes(), pixels(seed=1).tobytes()]


async def test_video(run, server, service, files):
    out = files / "out.mp4"
    done = await run("video", "a ball", "--source-video", files / "a.mp4", "--duration", 1, "--out", out, *server)
    assert done.code == 0, done.err
    assert "  32 x 16  9 frames at 10 fps  seed " in done.out
    assert "warning: DURATION_ROUNDED duration" in done.err
    asked = service.executor.request
    assert (asked.task, asked.num_frames, asked.inputs.source_video.num_frames) == (Task.VIDEO_TO_VIDEO, 9, 5)
    frames = ("--first-frame", files / "a.png", "--last-frame", files / "b.png", "--task", "image-to-video")
    options = (
        "--num-frames",
        5,
        "--fps",
        16,
        "--output-fps",
        30,
        "--format",
        "fmp4",
        "--seed",
        3,
        "--json",
        "--no-metadata",
    )
    done = await run("video", "a ball", *frames, *options, "--out", out, *server)
    assert (done.code, "warning" in done.err) == (0, False)
    record = json.loads(done.out)
    assert record["artifacts"][0]["num_frames"] == 5
    assert (record["effective"]["fps"], record["effective"]["output_fps"]) == (16, 30)
    assert record["effective"]["output_format"] == "FMP4"
    assert out.read_bytes() == noise(3)


async def test_audio(run, tmp_path):
    tmp_path.joinpath("a.wav").write_bytes(wav())
    checkpoint = studio(takes=frozenset({"duration", "start", "audio", "text", "strength"}))
    async with serving_studio(checkpoint) as service:
        done = await run(
            "audio", "rain", "--reference", tmp_path / "a.wav", "--duration", 2, "--start", 1, "--text", "la",
            "--sample-rate", 22050, "--strength", 0.25, "--out", tmp_path / "o.flac",
            "--server", f"127.0.0.1:{service.server.port}", "--seed", 5,
        )  # fmt: skip
        asked = service.executor.request
    assert done.code == 0, done.err
    assert done.out.startswith(f"{tmp_path / 'o.flac'}  2.00 s at 22050 Hz  seed 5  ")
    assert (asked.duration, asked.start, asked.text, asked.strength) == (2, 1, "la", 0.25)
    assert asked.inputs.given == ("audio",)
    assert tmp_path.joinpath("o.flac").read_bytes() == noise(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("edit", "x", "--out", "o.png"), "--image"),
        (("edit", "x", "--image", "a", "--out", "o.mp4"), "unknown extension '.mp4'; use one of .png"),
        (("video", "x", "--out", "o.png"), "unknown extension '.png'; use one of .mp4, .webm"),
        (("video", "x", "--out", "o.mp4", "--num-frames", "5", "--duration", "1"), "not allowed with argument"),
        (("video", "x", "--out", "o.mp4", "--extra", "a"), "'a' is not NAME=JSON"),
        (("video", "x", "--out", "o.mp4", "--extra", "a=b"), "'a=b' is not NAME=JSON"),
        (("video", "x", "--out", "o.mp4", "--adapter", "style=much"), "'style=much' is not NAME or NAME=SCALE"),
        (("video", "x", "--out", "o.mp4", "--adapter", "=1"), "'=1' is not NAME or NAME=SCALE"),
        (("video", "x", "--out", "o.mp4", "--lora", "a=b"), "is a setting of the server"),
        (("video", "x", "--out", "o.mp4", "--task", "paint"), "'paint' is not one of TEXT_TO_IMAGE"),
        (("audio", "x", "--out", "o.mp4"), "use one of .wav, .flac, .mp3, .opus, .ogg"),
        (("audio", "x", "--out", "o.wav", "--width", "3"), "--width"),
        (("audio", "x", "--out", "o.wav", "--vae-use-tiling", "yes"), "is a setting of the server"),
        (("audio", "x", "--out", "o.wav", "--vae-use-tiling=maybe"), "expected true or false"),
    ],
)
async def test_a_wrong_command_line_is_refused_before_anything_is_asked(run, service, server, arguments, message):
    done = await run(*arguments, *server)
    assert done.code == 2
    assert message in done.err
    assert len(service.engine.jobs) == 0


async def test_a_file_that_is_not_there_is_one_line(run, server, tmp_path):
    done = await run("edit", "x", "--image", tmp_path / "none.png", "--out", tmp_path / "o.png", *server)
    assert done.code == 1
    assert done.err == f"error: {tmp_path / 'none.png'}: there is no such file or folder\n"


async def test_help_of_each_command(run):
    for command in ("generate", "edit", "video", "audio"):
        done = await run(command, "--help")
        assert (done.code, "--extra NAME=JSON" in done.out) == (0, True)
