import dataclasses
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from omni_grpc.media_in import decode_image, decode_mask, decode_transparent_mask
from omni_grpc.types.errors import InvalidArgument
from tests.media_in.files import FIELD, LIMITS, picture, saved


def pixels(found):
    return np.frombuffer(found.data, np.uint8).reshape(found.height, found.width, found.channels)


def decoded(data, *, changes=None, **options):
    found, warnings = decode_image(data, limits=limits(**(changes or {})), field=FIELD, **options)
    assert all(warning.code == "INPUT_CONVERTED" and warning.field == FIELD for warning in warnings)
    return pixels(found), [warning.message for warning in warnings]


def refused(call, data, *arguments, reason, match=".", limits=LIMITS):
    with pytest.raises(InvalidArgument, match=match) as caught:
        call(data, *arguments, limits=limits, field=FIELD)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == [FIELD]


def limits(**changes):
    return dataclasses.replace(LIMITS, **changes)


def rgba():
    image = np.dstack([picture(), np.full((4, 6), 255, np.uint8)])
    image[0, 0, 3] = 0
    image[1, 1, 3] = 51
    return image


ON_WHITE = picture()
ON_WHITE[0, 0] = 255
ON_WHITE[1, 1] = np.rint(picture()[1, 1] / 5 + 255 * 4 / 5)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF"])
@pytest.mark.parametrize("mime_type", ["", "application/octet-stream", "mime_type"])
def test_rgb_comes_as_it_is(format, mime_type):
    mime_type = f"image/{format.lower()}" if mime_type == "mime_type" else mime_type
    found, notes = decoded(saved(picture(), format), mime_type=mime_type)
    assert np.array_equal(found, picture())
    assert notes == []


@pytest.mark.parametrize(("format", "mime_type"), [("JPEG", "image/jpg"), ("WEBP", "IMAGE/WebP; charset=x")])
def test_lossy_formats_come_close(format, mime_type):
    flat = np.full((32, 32, 3), (200, 30, 90), np.uint8)
    found, notes = decoded(saved(flat, format, quality=95), mime_type=mime_type)
    assert abs(found.astype(int) - flat).max() <= 4
    assert notes == []


def test_alpha_is_laid_on_white_with_a_warning():
    found, notes = decoded(saved(rgba(), "PNG"))
    assert abs(found.astype(int) - ON_WHITE).max() <= 1
    assert notes == ["transparent areas were composited on white"]


def test_alpha_is_kept_where_the_model_takes_it():
    found, notes = decoded(saved(rgba(), "PNG"), alpha=True)
    assert np.array_equal(found, rgba())
    assert notes == []
    assert decoded(saved(picture(), "PNG"), alpha=True)[0].shape == (4, 6, 3)


def opaque_files():
    opaque = np.dstack([picture(), np.full((4, 6), 255, np.uint8)])
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "lime")]
    palette = PIL.Image.fromarray(picture()).quantize(8)
    return {
        "PNG": (saved(opaque, "PNG"), []),
        "TIFF": (saved(opaque, "TIFF"), []),
        "LA": (saved(PIL.Image.fromarray(opaque).convert("LA"), "PNG"), []),
        "WebP animation": (
            saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
            ["only the first frame is used"],
        ),
        "palette entry that no pixel has": (saved(palette, "PNG", transparency=200), []),
        "color that no pixel has": (saved(picture(), "PNG", transparency=(1, 2, 3)), []),
    }


@pytest.mark.parametrize("name", opaque_files())
def test_nothing_is_said_of_transparent_areas_where_there_are_none(name):
    data, expected = opaque_files()[name]
    assert decoded(data)[1] == expected
    found, warnings = decode_mask(data, limits=LIMITS, field=FIELD)
    assert found.channels == 1
    assert [warning.message for warning in warnings] == expected


def test_gray_with_alpha_becomes_rgb_on_white():
    image = PIL.Image.fromarray(np.dstack([np.full((2, 2), 100, np.uint8), np.array([[255, 0], [51, 255]], np.uint8)]))
    assert image.mode == "LA"
    found, notes = decoded(saved(image, "PNG"))
    assert found[..., 0].tolist() == [[100, 255], [224, 100]]
    assert notes == ["transparent areas were composited on white"]


def test_a_transparent_palette_color_becomes_white():
    image = PIL.Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    assert decoded(saved(image, "PNG"))[0].tolist() == [[[10, 20, 30], [40, 50, 60]]]
    found, notes = decoded(saved(image, "PNG", transparency=1))
    assert found.tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert notes == ["transparent areas were composited on white"]


def test_a_transparent_rgb_color_becomes_white():
    found, notes = decoded(saved(picture(), "PNG", transparency=tuple(int(v) for v in picture()[2, 3])))
    expected = picture()
    expected[2, 3] = 255
    assert np.array_equal(found, expected)
    assert notes == ["transparent areas were composited on white"]


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_the_upper_eight(format):
    values = np.array([[0, 255, 256], [0x1234, 0xFF00, 0xFFFF]], np.uint16)
    found, notes = decoded(saved(PIL.Image.fromarray(values), format))
    assert found[..., 0].tolist() == [[0, 0, 1], [0x12, 0xFF, 0xFF]]
    assert np.array_equal(found[..., 0], found[..., 2])
    assert notes == ["the upper 8 of its 16 bits are used"]


def test_cmyk_is_converted_with_a_warning():
    image = PIL.Image.new("CMYK", (32, 32), (0, 255, 255, 0))  # red
    found, notes = decoded(saved(image, "JPEG", quality=95))
    assert abs(found.astype(int) - (255, 0, 0)).max() <= 4
    assert notes == ["was converted to RGB without a color profile"]


@pytest.mark.parametrize(("mode", "values"), [("1", [0, 255]), ("L", [0, 77])])
def test_one_channel_becomes_three(mode, values):
    image = PIL.Image.new(mode, (2, 1))
    image.putdata(values)
    found, notes = decoded(saved(image, "PNG"))
    assert found.tolist() == [[[v] * 3 for v in values]]
    assert notes == []


def test_floats_have_no_known_range_and_are_refused():
    data = saved(PIL.Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")
    refused(decode_image, data, reason="INPUT_NOT_SUPPORTED", match="pixels of mode F")
    data = saved(PIL.Image.fromarray(np.zeros((2, 2), np.int32)), "TIFF")
    refused(decode_image, data, reason="INPUT_NOT_SUPPORTED", match="pixels of mode I")


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (1, lambda a: a),
        (2, np.fliplr),
        (3, lambda a: np.rot90(a, 2)),
        (4, np.flipud),
        (5, lambda a: a.swapaxes(0, 1)),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: np.rot90(a.swapaxes(0, 1), 2)),
        (8, np.rot90),
    ],
)
def test_exif_turns_the_picture_upright(orientation, turn):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    found, notes = decoded(saved(picture(), "PNG", exif=exif))
    assert np.array_equal(found, turn(picture()))
    assert notes == ([] if orientation == 1 else ["was rotated upright according to its EXIF orientation"])


def test_a_tiff_is_turned_by_its_reader_and_says_so_too():
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    found, notes = decoded(saved(picture(), "TIFF", exif=exif))
    assert np.array_equal(found, np.rot90(picture(), -1))
    assert notes == ["was rotated upright according to its EXIF orientation"]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_is_used(format):
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {} if format == "TIFF" else {"duration": 100}
    lossless = {"lossless": True} if format == "WEBP" else {}
    data = saved(frames[0], format, save_all=True, append_images=frames[1:], **options, **lossless)
    found, notes = decoded(data)
    assert (found == (255, 0, 0)).all()
    assert notes == ["only the first frame is used"]


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


PROSE = zlib.compress(bytes(3 << 20))
LARGE = {
    "zTXt": chunk(b"zTXt", b"workflow\0\0" + PROSE),
    "iTXt": chunk(b"iTXt", b"workflow\0\1\0\0\0" + PROSE),
    "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + PROSE),
    "EXIF in a text": chunk(b"zTXt", b"Raw profile type exif\0\0" + PROSE),
    "tEXt": chunk(b"tEXt", b"workflow\0" + bytes(1 << 19)) * 130,
    "iCCP": chunk(b"iCCP", b"profile\0\0" + PROSE),
    "unknown method": chunk(b"zTXt", b"workflow\0\7" + PROSE),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("place", ["in front of the pixels", "behind them"])
def test_metadata_of_a_png_does_not_make_it_unreadable(name, place):
    """`tEXt` is more than the 64 MiB that PIL takes of texts altogether."""
    data = saved(picture(), "PNG")
    at = data.index(b"IDAT" if place == "in front of the pixels" else b"IEND") - 4
    found, notes = decoded(data[:at] + LARGE[name] + data[at:], changes={"max_bytes": 1 << 27})
    assert np.array_equal(found, picture())
    assert notes == []


def test_texts_that_say_how_to_turn_a_png_are_still_read():
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    raw = f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = saved(picture(), "PNG")
    at = data.index(b"IDAT") - 4
    for text in (
        chunk(b"tEXt", b"Raw profile type exif\0" + raw),
        chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw)),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
    ):
        found, notes = decoded(data[:at] + LARGE["zTXt"] + text + data[at:])
        assert np.array_equal(found, np.rot90(picture(), -1))
        assert notes == ["was rotated upright according to its EXIF orientation"]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF"])
def test_a_large_profile_of_another_kind_of_file_is_no_obstacle(kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    flat = np.full((16, 16, 3), (200, 30, 90), np.uint8)
    profile = np.random.default_rng(0).integers(0, 256, 700_000, dtype=np.uint8).tobytes()
    found, notes = decoded(saved(flat, kind, icc_profile=profile, **options))
    assert abs(found.astype(int) - flat).max() <= 4
    assert notes == []


def bomb(width, height):
    """A PNG of one colour: a small file whatever its size. Only the header of it is ever read."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(257, 256), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_by_the_header(size):
    refused(decode_image, bomb(*size), reason="INPUT_TOO_LARGE")


def test_the_largest_picture_is_taken():
    data = saved(np.zeros((256, 256, 3), np.uint8), "PNG")
    assert decoded(data)[0].shape == (256, 256, 3)
    refused(decode_image, data, reason="INPUT_TOO_LARGE", match="256 x 256", limits=limits(max_pixels=256 * 256 - 1))


def test_too_many_bytes_are_refused_with_the_limit():
    data = saved(picture(), "PNG")
    refused(
        decode_image,
        data,
        reason="INPUT_TOO_LARGE",
        match=f"the maximum is {len(data) - 1}",
        limits=limits(max_bytes=len(data) - 1),
    )
    decode_image(data, limits=limits(max_bytes=len(data)), field=FIELD)


def test_an_empty_image_is_refused():
    refused(decode_image, b"", reason="INPUT_EMPTY", match="no bytes")


def test_a_type_other_than_the_declared_one_is_refused():
    refused(decode_image, saved(picture(), "PNG"), "image/jpeg", reason="INPUT_TYPE_MISMATCH", match="image/png")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"hello, this is text", "an unknown type"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg"),
        (b"\0\0\0\x1cftypavif" + bytes(40), "image/avif"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio/wav"),
    ],
)
def test_a_file_that_is_no_image_is_refused(data, kind):
    refused(decode_image, data, reason="INPUT_UNREADABLE", match=kind)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_is_refused(format):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(noise, format)
    refused(decode_image, data[: len(data) // 2], reason="INPUT_UNREADABLE", match="cannot be read")


def test_a_mask_is_one_channel_of_brightness():
    image = PIL.Image.new("RGB", (3, 1))
    image.putdata([(0, 0, 0), (255, 255, 255), (128, 128, 128)])
    for opaque in (image, image.convert("L"), image.convert("RGBA")):
        found, warnings = decode_mask(saved(opaque, "PNG"), limits=LIMITS, field=FIELD)
        assert (found.width, found.height, found.channels) == (3, 1, 1)
        assert list(found.data) == [0, 255, 128]
        assert warnings == ()
    found, _ = decode_mask(saved(image.convert("1", dither=PIL.Image.Dither.NONE), "PNG"), limits=LIMITS, field=FIELD)
    assert list(found.data[:2]) == [0, 255]


def test_a_mask_that_is_not_opaque_is_refused():
    refused(decode_mask, saved(rgba(), "PNG"), reason="INPUT_NOT_SUPPORTED", match="white is regenerated")


def test_a_transparent_mask_is_white_where_it_shows_nothing():
    image = PIL.Image.new("RGBA", (4, 1), (255, 255, 255, 255))
    for x, alpha in enumerate((255, 200, 1, 0)):
        image.putpixel((x, 0), (9, 9, 9, alpha))
    found, warnings = decode_transparent_mask(saved(image, "PNG"), limits=LIMITS, field=FIELD)
    assert (found.width, found.height, found.channels, list(found.data)) == (4, 1, 1, [0, 55, 254, 255])
    assert warnings == ()
    palette = image.convert("P")
    palette.info["transparency"] = palette.getpixel((3, 0))
    found, _ = decode_transparent_mask(saved(palette, "PNG"), limits=LIMITS, field=FIELD)
    assert found.data[3] == 255
    opaque = saved(image.convert("RGB"), "PNG")
    refused(decode_transparent_mask, opaque, reason="INPUT_NOT_SUPPORTED", match="opaque everywhere")
