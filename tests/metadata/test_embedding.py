"""Parameters in files: every format takes them and gives them back, and what is encoded stays as it is."""

from __future__ import annotations

import functools
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest

from omni_grpc.config import LimitsConfig
from omni_grpc.media_in import MediaLimits
from omni_grpc.media_in.image import decode_image
from omni_grpc.metadata import embedded, parameters_in
from omni_grpc.types.errors import FailedPrecondition
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.parameters import NotEmbedded, Parameters, has_place
from omni_grpc.types.requested import Requested
from omni_grpc.worker.media import encode, encode_audio, encode_video

PROMPT = 'a red circle, \u7d05\u3044\u5186 & <b>"quoted"\nsecond line'
PARAMETERS = Parameters(
    asked=Requested(
        kind="image",
        model="toy",
        prompt=PROMPT,
        options={"negative_prompt": "blur", "steps": 3, "extra": {"style": [1, None]}},
        inputs={"images": [{"sha256": "00ff"}]},
        server="0.1.0",
    ),
    seed=2**53 - 1,
    index=1,
    layer=0,
    effective={"width": 48, "height": 33, "steps": 3, "scheduler": "Euler", "guidance": {"true_cfg_scale": 4.0}},
    version="0.1.0",
)
FORMATS = [*ImageFormat, *VideoFormat, *AudioFormat]
PLACES = [kind for kind in FORMATS if has_place(kind)]
RANDOM = np.random.default_rng(0)


def sound(seconds: float = 0.7, rate: int = 16000) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return np.stack([np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 300 * time)]).astype(np.float32) / 2


@functools.cache
def made(kind: OutputFormat, alpha: bool = False) -> bytes:
    """A file as the worker writes it."""
    if isinstance(kind, ImageFormat):
        return encode(np.random.default_rng(0).integers(0, 255, (33, 48, 3 + alpha), np.uint8), kind)
    if isinstance(kind, AudioFormat):
        return encode_audio(sound(), 16000, kind)
    frames = np.random.default_rng(0).integers(0, 255, (7, 34, 48, 3), np.uint8)
    return encode_video(frames, 12.5, kind, (sound(), 16000))


def content(data: bytes) -> list[Any]:
    """All that a player gets of a video or sound: of each stream, and each packet and frame with its time."""
    with av.open(io.BytesIO(data)) as file:
        streams = [(s.type, s.codec_context.extradata, s.time_base, s.start_time, s.duration) for s in file.streams]
        packets = [(p.stream.index, p.pts, p.dts, bytes(p)) for p in file.demux()]
    with av.open(io.BytesIO(data)) as file:
        rates = [s.average_rate for s in file.streams.video]
        frames = [(f.pts, f.time_base, f.to_ndarray().tobytes()) for f in file.decode()]
    return [streams, packets, rates, frames]


def put_in(kind: OutputFormat, data: bytes) -> bytes:
    return embedded(data, kind, PARAMETERS.text(), PARAMETERS.infotext())


@pytest.mark.parametrize("kind", PLACES)
def test_parameters_come_back_and_what_is_encoded_is_the_same(kind: OutputFormat, tmp_path: Path) -> None:
    before = made(kind)
    after = put_in(kind, before)
    file = tmp_path / "a.bin"
    file.write_bytes(after)
    assert parameters_in(file) == PARAMETERS
    assert put_in(kind, before) == after, "the same file, to the byte"
    if isinstance(kind, ImageFormat):
        first, second = PIL.Image.open(io.BytesIO(before)), PIL.Image.open(io.BytesIO(after))
        assert (first.mode, first.size, first.tobytes()) == (second.mode, second.size, second.tobytes())
    else:
        assert content(before) == content(after)


@pytest.mark.parametrize("kind", [ImageFormat.PNG, ImageFormat.WEBP])
def test_alpha_stays(kind: ImageFormat, tmp_path: Path) -> None:
    before = made(kind, alpha=True)
    after = put_in(kind, before)
    tmp_path.joinpath("a").write_bytes(after)
    assert parameters_in(tmp_path / "a") == PARAMETERS
    first, second = PIL.Image.open(io.BytesIO(before)), PIL.Image.open(io.BytesIO(after))
    assert first.mode == second.mode == "RGBA"
    assert first.tobytes() == second.tobytes()


def test_lossless_webp_keeps_its_alpha() -> None:
    buffer = io.BytesIO()
    PIL.Image.open(io.BytesIO(made(ImageFormat.PNG, alpha=True))).save(buffer, "WEBP", lossless=True, exact=True)
    first = PIL.Image.open(io.BytesIO(buffer.getvalue()))
    second = PIL.Image.open(io.BytesIO(put_in(ImageFormat.WEBP, buffer.getvalue())))
    assert (first.mode, first.tobytes()) == (second.mode, second.tobytes())


@pytest.mark.parametrize("kind", [ImageFormat.PNG, ImageFormat.JPEG, ImageFormat.WEBP])
def test_other_readers_find_their_text(kind: ImageFormat) -> None:
    """AUTOMATIC1111's: `parameters` in a PNG, EXIF UserComment in UTF-16 elsewhere."""
    image = PIL.Image.open(io.BytesIO(put_in(kind, made(kind))))
    if kind is ImageFormat.PNG:
        text, ours = image.text["parameters"], image.text["omni_grpc"]  # type: ignore[attr-defined]
    else:
        comment = image.getexif().get_ifd(0x8769)[0x9286]
        text, ours = comment.removeprefix(b"UNICODE\0").decode("utf-16-be"), image.getexif()[0x010E]
    assert json.loads(ours) == PARAMETERS.record()
    assert text == (
        f"{PROMPT}\nNegative prompt: blur\n"
        "Steps: 3, Sampler: Euler, CFG scale: 4, Seed: 9007199254740991, Size: 48x33, Model: toy, "
        "Version: omni_grpc 0.1.0"
    )


def test_every_chunk_of_a_png_has_its_checksum() -> None:
    data, at, names = put_in(ImageFormat.PNG, made(ImageFormat.PNG)), 8, []
    while at < len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(data[at + 4 : at + 8 + length])
        names.append(name)
        at += 12 + length
    assert names[:3] == [b"IHDR", b"tEXt", b"iTXt"]
    assert names[-1] == b"IEND"


@pytest.mark.parametrize("kind", [ImageFormat.PNG, ImageFormat.JPEG, ImageFormat.WEBP])
def test_such_a_picture_is_an_input_like_any_other(kind: ImageFormat) -> None:
    before, after = made(kind), put_in(kind, made(kind))
    limits = MediaLimits.of(LimitsConfig())
    assert decode_image(before, limits=limits, field="a") == decode_image(after, limits=limits, field="a")


@pytest.mark.parametrize("kind", PLACES)
def test_a_file_that_is_no_such_file_is_told(kind: OutputFormat) -> None:
    for data in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"RIFF\4\0\0\0WEBP", b"nothing of the kind" * 9):
        with pytest.raises(NotEmbedded, match=f"not {kind}"):
            put_in(kind, data)


def test_what_has_no_room_is_told() -> None:
    with pytest.raises(NotEmbedded, match="a JPEG has room for 65533"):
        embedded(made(ImageFormat.JPEG), ImageFormat.JPEG, "x" * 66000, "")
    with pytest.raises(NotEmbedded, match="raw pixels"):
        put_in(ImageFormat.RAW_RGB8, made(ImageFormat.RAW_RGB8))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_without_parameters_is_an_error(kind: OutputFormat, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(made(kind))
    with pytest.raises(FailedPrecondition, match="no parameters of a generation") as caught:
        parameters_in(file)
    assert (caught.value.reason, str(file) in str(caught.value)) == ("NO_PARAMETERS", True)


RECORD = PARAMETERS.record()
DAMAGED: list[dict[str, Any]] = [
    {"omni_grpc": "1"},
    {"omni_grpc": []},
    RECORD | {"kind": "film"},
    RECORD | {"seed": "7"},
    RECORD | {"inputs": [1]},
    RECORD | {"effective": {"defaults_used": {"width": "wide"}}},
    RECORD | {"effective": {"defaults_used": [1]}},
]


@pytest.mark.parametrize("record", DAMAGED)
def test_damaged_parameters_are_an_error(record: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(embedded(made(ImageFormat.PNG), ImageFormat.PNG, json.dumps(record), ""))
    with pytest.raises(FailedPrecondition, match="not ours, or damaged"):
        parameters_in(file)
