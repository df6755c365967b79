"""One picture, given as a path, bytes, a data: URL, a PIL image or an array: the same pixels and the same warnings."""

import base64
import io

import numpy as np
import PIL.Image
import pytest

from omni_grpc import InvalidArgument, Omni
from omni_grpc.client import messages
from omni_grpc.client.media import media_input
from omni_grpc.config import EngineConfig
from omni_grpc.media_in.inputs import InputFile, decode
from tests.media_in.files import picture, saved
from tests.server.studio import serving_studio

LIMITS = EngineConfig.from_settings(model="toy").limits


def turned(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return exif


def animation(kind, **options):
    frames = [PIL.Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)


BASE = PIL.Image.fromarray(picture())
SIXTEEN = PIL.Image.fromarray((np.arange(24).reshape(4, 6) * 2500).astype(np.uint16))
TRANSPARENT = np.dstack([picture(), np.arange(24, dtype=np.uint8).reshape(4, 6) * 10])

FILES = {
    "RGB PNG": saved(BASE, "PNG"),
    "1 PNG": saved(BASE.convert("1"), "PNG"),
    "L BMP": saved(BASE.convert("L"), "BMP"),
    "P GIF": saved(BASE.convert("P", palette=PIL.Image.Palette.ADAPTIVE), "GIF"),
    "P with a transparent entry": saved(BASE.convert("P"), "PNG", transparency=3),
    "RGB with a transparent color": saved(BASE, "PNG", transparency=tuple(picture()[2, 3].tolist())),
    "RGBA PNG": saved(TRANSPARENT, "PNG"),
    "RGBA WebP": saved(TRANSPARENT, "WEBP", lossless=True),
    "LA PNG": saved(PIL.Image.fromarray(TRANSPARENT).convert("LA"), "PNG"),
    "16 bits PNG": saved(SIXTEEN, "PNG"),
    "16 bits TIFF": saved(SIXTEEN, "TIFF"),
    "16 bits TIFF, other byte order": saved(PIL.Image.fromarray(np.asarray(SIXTEEN).astype(">u2")), "TIFF"),
    "CMYK TIFF": saved(BASE.convert("CMYK"), "TIFF"),
    "CMYK JPEG": saved(BASE.convert("CMYK"), "JPEG"),
    "LAB TIFF": saved(PIL.Image.new("LAB", (6, 4), (100, 140, 90)), "TIFF"),
    "JPEG with a profile": saved(BASE, "JPEG", icc_profile=bytes(500)),
    "GIF animation": animation("GIF", duration=90),
    "WebP animation": animation("WEBP", duration=90, lossless=True),
    "PNG animation": animation("PNG", duration=90),
    "TIFF of several pages": animation("TIFF"),
    **{f"JPEG orientation {n}": saved(BASE, "JPEG", exif=turned(n)) for n in range(1, 9)},
    "WebP orientation 6": saved(BASE, "WEBP", exif=turned(6), lossless=True),
    "16 bits PNG orientation 8": saved(SIXTEEN, "PNG", exif=turned(8)),
    "CMYK JPEG orientation 3": saved(BASE.convert("CMYK"), "JPEG", exif=turned(3)),
}


def forms(data, folder):
    """The file in every form that the API takes. The name of the file on disk lies about its type."""
    path = folder / "picture.mp4"
    path.write_bytes(data)
    return {
        "path": path,
        "text": str(path),
        "bytes": data,
        "view": memoryview(data),
        "data URL": "DATA:;base64," + base64.b64encode(data).decode(),
        "PIL image": PIL.Image.open(io.BytesIO(data)),
    }


def decoded(form, name="images"):
    one = media_input(form)
    file = InputFile(path=name, name=name, data=one.data, uri=one.uri, mime_type=one.mime_type)
    inputs, warnings = decode([file], LIMITS)
    return inputs, [(w.code, w.field, w.message, w.requested, w.applied) for w in warnings]


@pytest.mark.parametrize("name", FILES)
def test_every_form_of_a_file_is_decoded_alike(name, tmp_path):
    data = FILES[name]
    expected = decoded(data)
    for form, given in forms(data, tmp_path).items():
        assert decoded(given) == expected, form
    image = PIL.Image.open(io.BytesIO(data))
    if hasattr(image, "load") and "TIFF" not in name:
        image.load()
        assert decoded(image) == expected


def test_a_rotated_picture_is_upright_with_a_warning():
    inputs, warnings = decoded(PIL.Image.open(io.BytesIO(FILES["16 bits PNG orientation 8"])))
    upright = np.rot90(np.asarray(SIXTEEN) >> 8)
    assert inputs.images[0].data == np.repeat(upright[..., None], 3, 2).astype(np.uint8).tobytes()
    assert [message for _, _, message, _, _ in warnings] == [
        "was rotated upright according to its EXIF orientation",
        "the upper 8 of its 16 bits are used",
    ]


def test_lab_becomes_the_same_color():
    inputs, warnings = decoded(PIL.Image.new("LAB", (1, 1), (138, 210, 200)))  # L 54.1, a 82, b 72: red in D50 is near
    red, green, blue = inputs.images[0].data
    assert (red > 240, green < 60, blue < 40) == (True, True, True)
    assert warnings == [("INPUT_CONVERTED", "images", "was converted to RGB from CIELAB (D50)", "LAB", "RGB")]


@pytest.mark.parametrize("mode", ["RGBa", "La", "PA", "HSV", "YCbCr", "RGBX"])
def test_modes_that_only_memory_holds_are_taken(mode):
    source = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode, "RGB")
    image = BASE.convert(source).convert(mode)
    expected, _ = decoded(image.convert({"La": "LA"}.get(mode, "RGBA")))
    assert decoded(image)[0] == expected


@pytest.mark.parametrize("mode", ["F", "I"])
def test_numbers_without_a_range_are_refused_by_the_decoder_like_their_file(mode):
    image = BASE.convert(mode)
    for form in (image, saved(image, "TIFF")):
        with pytest.raises(InvalidArgument, match=f"images: has pixels of mode {mode}") as caught:
            decoded(form)
        assert caught.value.reason == "INPUT_NOT_SUPPORTED"


@pytest.mark.parametrize("pixels", [picture(), picture()[..., 0], TRANSPARENT, picture()[::-1, ::2, ::-1]])
def test_an_array_is_its_own_picture(pixels):
    expected = decoded(saved(np.ascontiguousarray(pixels), "PNG"))
    assert decoded(pixels) == expected
    if pixels.ndim == 2:
        assert decoded(pixels, "mask")[0].mask.data == pixels.tobytes()


CUT = saved(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "PNG")[:6000]
NOT_MEDIA = {
    "float array": (picture().astype(np.float32), "numpy array of float32 with shape"),
    "two channels": (picture()[..., :2], r"\(4, 6, 2\); send uint8"),
    "a batch": (picture()[None], r"send uint8 of \(height, width\)"),
    "no pixels": (picture()[:0], "numpy array"),
    "empty picture": (PIL.Image.new("RGB", (0, 4)), "0 x 4 without pixels"),
    "a file that is cut off": (PIL.Image.open(io.BytesIO(CUT)), "PNG file that PIL cannot read"),
}


@pytest.mark.parametrize("name", NOT_MEDIA)
@pytest.mark.parametrize("field", ["images", "mask"])
def test_what_cannot_be_sent_names_its_field_and_the_fix(name, field, tiny_omni):
    given, match = NOT_MEDIA[name]
    options = {"mask": given} if field == "mask" else {}
    images = [b"x", given] if field == "images" else [b"x"]
    place = r"images \[1\] is a" if field == "images" else "mask is a"
    for build in (
        lambda: messages.edit_request("m", "x", images, options),
        lambda: tiny_omni._decode({"images": images, **options}),
    ):
        with pytest.raises(InvalidArgument, match=f"{place}.*{match}") as caught:
            build()
        assert [violation.field for violation in caught.value.violations] == [field]


@pytest.fixture(scope="module")
def tiny_omni(tiny_qwen_image):
    with Omni(str(tiny_qwen_image), device="cpu", cpu_threads=1, warm_up_seconds=0) as omni:
        yield omni


NAMES = ["JPEG orientation 6", "CMYK TIFF", "GIF animation", "RGBA PNG"]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_server_every_form_is_decoded_alike(name, tmp_path, tiny_omni):
    given = forms(FILES[name], tmp_path)
    expected = tiny_omni._decode({"images": [FILES[name]]})[:2]
    for form, value in given.items():
        assert tiny_omni._decode({"images": [value]})[:2] == expected, form


@pytest.mark.service
async def test_a_server_gets_the_same_from_every_form(kind, tmp_path):
    async with serving_studio() as service, kind(f"127.0.0.1:{service.server.port}") as client:
        for name in NAMES:
            given = forms(FILES[name], tmp_path)
            seen = []
            for form in given.values():
                result = await client.edit_image("blue", images=[form], width=32, height=16)
                seen.append((service.executor.request.inputs, result.warnings))
            assert all(one == seen[0] for one in seen), name
            assert any(warning.code == "INPUT_CONVERTED" for warning in seen[0][1]), name
