import io

import PIL.Image
import pytest

from omni_grpc.client import ImageResult
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance
from omni_grpc.types.results import Artifact, Effective, Stats


def result(outputs=1, kind=ImageFormat.PNG, files=None):
    artifacts = tuple(
        Artifact(
            artifact_id=f"art_{i}", job_id="job_1", index=i, mime_type=kind.mime_type, size_bytes=1, sha256="",
            width=4, height=2, seed=7 + i,
        )
        for i in range(outputs)
    )  # fmt: skip
    effective = Effective(
        width=4, height=2, steps=1, evals=1, seeds=(), guidance=Guidance(), scheduler="", output_format=kind
    )
    return ImageResult(
        job_id="job_1", files=files or tuple(b"file %d" % i for i in range(outputs)), artifacts=artifacts,
        effective=effective, warnings=(), stats=Stats(),
    )  # fmt: skip


def test_one_output_takes_the_path_and_several_are_numbered(tmp_path):
    assert result().save(tmp_path / "out.png") == [tmp_path / "out.png"]
    paths = result(3).save(tmp_path / "a.b.png")
    assert [path.name for path in paths] == ["a.b-0.png", "a.b-1.png", "a.b-2.png"]
    assert [path.read_bytes() for path in paths] == [b"file 0", b"file 1", b"file 2"]


@pytest.mark.parametrize(
    ("kind", "name", "fits"),
    [
        (ImageFormat.PNG, "x.jpg", ".png"),
        (ImageFormat.JPEG, "x.png", ".jpg or .jpeg"),
        (ImageFormat.WEBP, "x", ".webp"),
        (ImageFormat.RAW_RGB8, "x.png", ".rgb"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(tmp_path, kind, name, fits):
    with pytest.raises(InvalidArgument, match=f"use {fits}"):
        result(kind=kind).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_images_are_decoded_once_and_only_when_looked_at():
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (4, 2), (9, 8, 7)).save(buffer, "PNG")
    whole = result(files=(buffer.getvalue(),))
    assert whole.images[0].getpixel((3, 1)) == (9, 8, 7)
    assert whole.images is whole.images
    broken = result(files=(b"not a PNG",))
    with pytest.raises(PIL.UnidentifiedImageError):
        _ = broken.images


def test_raw_pixels_need_no_decoder():
    raw = result(kind=ImageFormat.RAW_RGB8, files=(bytes(range(24)),))
    assert raw.images[0].size == (4, 2)
    assert raw.images[0].getpixel((0, 1)) == (12, 13, 14)
    assert raw.seeds == (7,)
