"""Outputs with their parameters in them: what is encoded stays the same, and the figures are those of the file."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest

from omni_grpc.config import LimitsConfig
from omni_grpc.metadata import has_parameters, parameters_in
from omni_grpc.pipeline.outputs import Output
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.parameters import has_place
from omni_grpc.types.request import Draft, Request, Task
from omni_grpc.types.version import __version__
from omni_grpc.worker import delivery, media
from tests.server.studio import studio

FORMATS: list[OutputFormat] = [*ImageFormat, *VideoFormat, *AudioFormat]
PLACES = [kind for kind in FORMATS if has_place(kind)]
COURSE = delivery.Course(steps=2, evals=5, dropped_tokens={"prompt": 3})
RANDOM = np.random.default_rng(0)
HASHES = ["371b7f8dad13459c", "1fc8b302e9659f17", "ad390220b4c311e0"]
"""Of a sound in WAV and two pictures as raw pixels, as they were before files could have parameters."""
PIXELS = RANDOM.integers(0, 255, (2, 32, 48, 4), np.uint8)
FRAMES = RANDOM.integers(0, 255, (5, 32, 48, 3), np.uint8)
SOUND = (np.arange(8000) % 97 / 97 - 0.5).astype(np.float32)[None]


def request(kind: OutputFormat, **fields: Any) -> Request:
    task = {ImageFormat: Task.TEXT_TO_IMAGE, VideoFormat: Task.TEXT_TO_VIDEO, AudioFormat: Task.TEXT_TO_AUDIO}
    size = {} if isinstance(kind, AudioFormat) else {"width": 48, "height": 32}
    values = {"prompt": "a red circle", "seeds": (7,), "output_format": kind} | size | fields
    draft = Draft(model="toy", task=task[type(kind)], **values)
    return resolve_request(draft, ServingFacts(studio(), LimitsConfig()), id="job_0").request


def outputs(kind: OutputFormat) -> list[Output]:
    if isinstance(kind, ImageFormat):
        return [Output(pixels=one) for one in PIXELS]
    return [Output(samples=SOUND) if isinstance(kind, AudioFormat) else Output(pixels=FRAMES, samples=SOUND)]


def delivered(request: Request) -> tuple[delivery.Delivered, list[bytes]]:
    files = [delivery.encode(one, request, fps=8.0, sample_rate=16000) for one in outputs(request.output_format)]
    put = delivery.Delivery("omni-test-embed-", scheduler="Own", found=lambda: WorkerFindings(attention_backend="sdpa"))
    done = put.put(request, files, COURSE)
    return done, [shared.take(one.data) for one in done.media]


def content(data: bytes, kind: OutputFormat) -> Any:
    """What a viewer or player gets of it."""
    if isinstance(kind, ImageFormat):
        image = PIL.Image.open(io.BytesIO(data))
        return image.mode, image.size, image.tobytes()
    with av.open(io.BytesIO(data)) as file:
        return [(p.stream.index, p.pts, p.dts, bytes(p)) for p in file.demux()]


@pytest.mark.parametrize("kind", FORMATS)
def test_without_the_option_a_file_is_what_its_encoder_makes(kind: OutputFormat) -> None:
    asked = request(kind, num_outputs=len(outputs(kind)))
    assert asked.embedding is None
    done, files = delivered(asked)
    if isinstance(kind, ImageFormat):
        expected = [media.encode(one, kind) for one in PIXELS]
    elif isinstance(kind, VideoFormat):
        expected = [media.encode_video(FRAMES, 8.0, kind, (SOUND, 16000))]
    else:
        expected = [media.encode_audio(SOUND, 16000, kind)]
    assert (files, done.warnings) == (expected, ())
    assert not any(map(has_parameters, files))


def test_without_the_option_a_file_has_the_bytes_of_earlier_versions() -> None:
    """Formats whose bytes no codec decides."""
    _, (wav,) = delivered(request(AudioFormat.WAV))
    _, raw = delivered(request(ImageFormat.RAW_RGB8, num_outputs=2))
    assert [hashlib.sha256(data).hexdigest()[:16] for data in (wav, *raw)] == HASHES


@pytest.mark.parametrize("kind", PLACES)
def test_with_it_the_file_says_how_it_was_made(kind: OutputFormat, tmp_path: Path) -> None:
    count = len(outputs(kind))
    fields: dict[str, Any] = {"num_outputs": count, "negative_prompt": "blur", "steps": 2}
    _, before = delivered(request(kind, **fields))
    asked = request(kind, **fields, embed_parameters=True)
    done, files = delivered(asked)
    assert done.warnings == ()
    for index, (one, data, plain) in enumerate(zip(done.media, files, before, strict=True)):
        assert (one.data.size, one.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert data != plain
        assert content(data, kind) == content(plain, kind)
        (tmp_path / "a").write_bytes(data)
        found = parameters_in(tmp_path / "a")
        assert (found.seed, found.index, found.layer, found.version) == (7 + index, index, None, __version__)
        assert (found.asked.prompt, found.asked.model, found.asked.server) == ("a red circle", "toy", "")
        assert found.asked.options["negative_prompt"] == "blur"
        assert "embed_parameters" not in found.asked.options
        told = {name: found.effective[name] for name in ("steps", "evals", "scheduler", "attention_backend")}
        assert told == {"steps": 2, "evals": 5, "scheduler": "Own", "attention_backend": "sdpa"}
        assert found.effective["dropped_tokens"] == {"prompt": 3}
        assert found.effective["defaults_used"] == asked.embedding.defaults_used  # type: ignore[union-attr]
        size = (0, 0) if isinstance(kind, AudioFormat) else (48, 32)
        assert (found.effective["width"], found.effective["height"]) == size
    assert delivered(asked)[1] == files, "the same file, to the byte"


def test_each_layer_is_told_from_the_others(tmp_path: Path) -> None:
    asked = dataclasses.replace(request(ImageFormat.PNG, embed_parameters=True), layers=2)
    done, files = delivered(asked)
    assert [one.layer for one in done.media] == [0, 1]
    for layer, data in enumerate(files):
        (tmp_path / "a").write_bytes(data)
        found = parameters_in(tmp_path / "a")
        assert (found.index, found.layer) == (0, layer)


def test_a_file_without_room_stays_as_it_is_and_the_reply_says_so() -> None:
    long = "a red circle " * 5000
    limits = LimitsConfig(max_prompt_chars=len(long))
    draft = Draft(model="toy", prompt=long, seeds=(7,), num_outputs=2, output_format=ImageFormat.JPEG)
    asked = [
        resolve_request(one, ServingFacts(studio(), limits), id="job_0").request
        for one in (draft, dataclasses.replace(draft, embed_parameters=True))
    ]
    (_, before), (done, files) = map(delivered, asked)
    assert files == before
    assert [(w.code, w.field) for w in done.warnings] == [("PARAMETERS_NOT_EMBEDDED", "options.embed_parameters")] * 2
    assert done.warnings[1].message.startswith("output 1 is without its parameters: they take ")
    assert [one.sha256 for one in done.media] == [hashlib.sha256(data).hexdigest() for data in before]


def test_raw_pixels_are_refused_before_work() -> None:
    with pytest.raises(InvalidArgument, match="choose the output_format PNG, JPEG, WEBP, or leave") as caught:
        request(ImageFormat.RAW_RGB8, embed_parameters=True)
    assert [violation.field for violation in caught.value.violations] == ["options.embed_parameters"]
