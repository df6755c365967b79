"""Whatever is cut off or flipped in a file: a refusal by field, or media within the limits, and nothing else."""

import functools
import re

import numpy as np
import PIL.Image
import PIL.PngImagePlugin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_grpc.media_in import decode_audio, decode_image, decode_mask, decode_video
from omni_grpc.media_in.source import kind_of
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import AudioFormat, VideoFormat
from omni_grpc.worker import media
from tests.media_in.files import LIMITS, film, picture, saved, tone

FIX = re.compile("send|leave|resample|cut it|scale|remove|encode it")
"""Every refusal says what to do."""

NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def other_images(rgba):
    """Those that other parts of the readers and of our conversions see."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    rgb = PIL.Image.fromarray(NOISE)
    text = PIL.PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n 8\n4578696600004d4d\n", zip=True)
    return {
        "PNG with texts": saved(rgba, "PNG", exif=exif, pnginfo=text, icc_profile=bytes(300)),
        "PNG of 16 bits": saved(PIL.Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16) * 250), "PNG"),
        "palette": saved(rgb.quantize(16), "PNG", transparency=bytes(range(16))),
        "animation": saved(rgb, "WEBP", save_all=True, append_images=[rgb.rotate(90)], exif=exif),
        "CMYK": saved(rgb.convert("CMYK"), "JPEG", exif=exif),
        "LAB": saved(PIL.Image.frombytes("LAB", (16, 16), NOISE.tobytes()), "TIFF", compression="tiff_lzw"),
    }


OTHERS = ["PNG with texts", "PNG of 16 bits", "palette", "animation", "CMYK", "LAB", "mask"]


@functools.cache
def files():
    images = {name: (decode_image, saved(NOISE, name)) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    rgba = np.dstack([NOISE, NOISE[..., :1]])
    images |= {name: (decode_image, data) for name, data in other_images(rgba).items()}
    images["mask"] = (decode_mask, saved(rgba, "PNG"))
    videos = {
        str(kind): (decode_video, media.encode_video(np.stack([NOISE, NOISE]), 8, kind, (tone(0.2), 16000)))
        for kind in VideoFormat
    }
    sounds = {str(kind): (decode_audio, media.encode_audio(tone(0.2), 16000, kind)) for kind in AudioFormat}
    return {**images, **videos, **sounds}


NAMES = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", *map(str, VideoFormat), *map(str, AudioFormat), *OTHERS]


def decoded_or_refused(decode, data):
    try:
        found, _ = decode(data, limits=LIMITS, field="x")
    except InvalidArgument as error:
        refusal = error
    else:
        check_found(decode, found)
        return
    (violation,) = refusal.violations
    assert violation.field == "x"
    assert refusal.reason.startswith("INPUT_")
    assert str(refusal) == f"x: {violation.description}"
    assert FIX.search(violation.description), violation.description
    kind = kind_of(data) or ("unknown type" if data else "no bytes")
    assert kind in violation.description, violation.description


def check_found(decode, found):
    if decode in (decode_image, decode_mask):
        assert len(found.data) == found.width * found.height * found.channels
        assert found.width * found.height <= LIMITS.max_pixels
    elif decode is decode_video:
        assert len(found.data) == found.width * found.height * found.num_frames * 3
        assert 1 <= found.num_frames <= LIMITS.max_frames
    else:
        values = np.frombuffer(found.data, "<f4")
        assert 0 < values.size / found.channels <= LIMITS.max_seconds * found.sample_rate
        assert np.abs(values).max() <= 1


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_file_is_taken(name):
    decode, data = files()[name]
    if name == "mask":
        with pytest.raises(InvalidArgument, match=r"x: is partly transparent; send an opaque mask.*it is image/png"):
            decode(data, limits=LIMITS, field="x")
    else:
        decode(data, limits=LIMITS, field="x")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_anywhere_is_refused_or_decoded(name, share):
    decode, data = files()[name]
    decoded_or_refused(decode, data[: int(share * len(data))])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_file_with_changed_bytes_is_refused_or_decoded(name, changes):
    decode, data = files()[name]
    broken = bytearray(data)
    for share, value in changes:
        broken[int(share * len(broken))] = value
    decoded_or_refused(decode, bytes(broken))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    head=st.sampled_from(
        [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x18ftypisom", b"OggS"]
    ),
    body=st.binary(max_size=200),
    decode=st.sampled_from([decode_image, decode_video, decode_audio]),
)
def test_bytes_that_are_no_file(head, body, decode):
    decoded_or_refused(decode, head + body)


def test_the_decoders_do_not_take_each_others_files():
    for decode, data in ((decode_video, saved(picture(), "PNG")), (decode_image, film()), (decode_audio, film())):
        with pytest.raises(InvalidArgument):
            decode(data, limits=LIMITS, field="x")
