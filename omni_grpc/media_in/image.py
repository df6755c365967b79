"""Decodes images and masks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping

import numpy as np
import PIL.Image
import PIL.ImageCms
import PIL.ImageOps

from omni_grpc.media_in.limits import MediaLimits
from omni_grpc.media_in.png import without_metadata
from omni_grpc.media_in.refusal import TOO_LARGE, UNSUPPORTED, Warnings, converted, faults_of, refusal
from omni_grpc.media_in.source import checked_kind
from omni_grpc.types.media import ImageInput
from omni_grpc.types.results import RequestWarning

_READERS: Mapping[str, str] = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
}
_ORIENTATION = 0x0112
"""The EXIF tag that says how to turn the picture; 1 is upright."""

_SAME = ("1", "L", "P", "RGB", "RGBX")
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_OTHER_COLOURS = ("CMYK", "YCbCr", "HSV")
_SIXTEEN_BITS: Mapping[str, str] = {"I;16": "<u2", "I;16L": "<u2", "I;16B": ">u2", "I": "=i4"}


def decode_image(
    data: bytes,
    mime_type: str = "",
    *,
    limits: MediaLimits,
    field: str,
    alpha: bool = False,
) -> tuple[ImageInput, Warnings]:
    """The picture as 8-bit RGB, upright, and how it was converted; with `alpha`, an alpha channel is kept (4 channels).

    Raises InvalidArgument, with `field` as its path, if the file is not PNG, JPEG, WebP, GIF, BMP or TIFF, is cut off,
    exceeds the limits, or is not what `mime_type` says.
    """
    with _opened(data, mime_type, limits, field) as (image, warnings):
        if _has_alpha(image) and alpha:
            return _packed(image.convert("RGBA")), warnings
        if _is_transparent(image):
            image = image.convert("RGBA")
            white = PIL.Image.new("RGBA", image.size, "white")
            image = PIL.Image.alpha_composite(white, image)
            warnings += (converted(field, "transparent areas were composited on white", "RGBA", "RGB"),)
        return _packed(_opaque(image)), warnings


def decode_mask(data: bytes, mime_type: str = "", *, limits: MediaLimits, field: str) -> tuple[ImageInput, Warnings]:
    """The brightness of the picture, one channel. Raises as `decode_image` does, and for a mask that is not opaque,
    since some programs mean its transparent areas and others its white ones.
    """
    with _opened(data, mime_type, limits, field) as (image, warnings):
        if _is_transparent(image):
            raise refusal(
                field, UNSUPPORTED, "is partly transparent; send an opaque mask: white is regenerated, black is kept"
            )
        return _packed(_opaque(image).convert("L")), warnings


def decode_transparent_mask(
    data: bytes, mime_type: str = "", *, limits: MediaLimits, field: str
) -> tuple[ImageInput, Warnings]:
    """The transparency of the picture, one channel: what shows nothing is white. Raises as `decode_image` does, and for
    a picture that is opaque everywhere.
    """
    with _opened(data, mime_type, limits, field) as (image, warnings):
        if not _is_transparent(image):
            raise refusal(
                field, UNSUPPORTED, "is opaque everywhere; make what is to be made anew transparent, or send a mask in "
                "black and white as mask_image"
            )  # fmt: skip
        return _packed(PIL.ImageOps.invert(image.convert("RGBA").getchannel("A"))), warnings


@contextlib.contextmanager
def _opened(data: bytes, mime_type: str, limits: MediaLimits, field: str) -> Iterator[tuple[PIL.Image.Image, Warnings]]:
    """The first frame, as `_normalised` gives it. What PIL raises, in here, is the input's fault: InvalidArgument."""
    kind = checked_kind(data, mime_type, tuple(_READERS), limits, field)
    if kind == "image/png":
        data = without_metadata(data)
    with faults_of(field, kind):
        try:
            with PIL.Image.open(io.BytesIO(data), formats=[_READERS[kind]]) as image:
                width, height = image.size
                if width * height > limits.max_pixels:
                    rule = f"is {width} x {height}; the maximum is {limits.max_pixels} pixels; scale it down"
                    raise refusal(field, TOO_LARGE, rule)
                yield _normalised(image, field)
        except PIL.Image.DecompressionBombError:
            raise refusal(field, TOO_LARGE, "has far more pixels than the limit; scale it down") from None


def _normalised(image: PIL.Image.Image, field: str) -> tuple[PIL.Image.Image, Warnings]:
    """First frame, upright, 8 bits; alpha and palette are still there."""
    warnings: list[RequestWarning] = []
    if getattr(image, "is_animated", False):
        warnings.append(converted(field, "only the first frame is used", "several frames", "1 frame"))
    # PIL turns a TIFF by itself while it loads it; a PNG may say so behind its pixels, and is loaded for it
    orientation = image.getexif().get(_ORIENTATION, 1)
    image.load()
    if orientation in range(2, 9):
        warnings.append(
            converted(field, "was rotated upright according to its EXIF orientation", f"orientation {orientation}", "1")
        )
    upright = PIL.ImageOps.exif_transpose(image)
    mode = upright.mode
    if mode in _SIXTEEN_BITS and not (mode == "I" and image.format != "PNG"):
        warnings.append(converted(field, "the upper 8 of its 16 bits are used", "16 bits", "8 bits"))
        values = np.frombuffer(upright.tobytes(), _SIXTEEN_BITS[mode]).reshape(upright.height, upright.width)
        upright = PIL.Image.fromarray((values >> 8).astype(np.uint8))
    elif mode in _OTHER_COLOURS:
        warnings.append(converted(field, "was converted to RGB without a color profile", mode, "RGB"))
        upright = upright.convert("RGB")
    elif mode == "LAB":
        warnings.append(converted(field, "was converted to RGB from CIELAB (D50)", mode, "RGB"))
        lab, srgb = PIL.ImageCms.createProfile("LAB"), PIL.ImageCms.createProfile("sRGB")
        turned = PIL.ImageCms.profileToProfile(upright, lab, srgb, outputMode="RGB")
        assert turned is not None  # None is for a conversion in place
        upright = turned
    elif mode not in (*_SAME, *_WITH_ALPHA):
        raise refusal(field, UNSUPPORTED, f"has pixels of mode {mode}, whose range is unknown; send 8 bits per channel")
    return upright, tuple(warnings)


def _has_alpha(image: PIL.Image.Image) -> bool:
    return image.mode in _WITH_ALPHA or "transparency" in image.info


def _is_transparent(image: PIL.Image.Image) -> bool:
    """Whether any pixel is, since readers give alpha to opaque pictures too (every animated WebP has it)."""
    return _has_alpha(image) and image.convert("RGBA").getchannel("A").getextrema()[0] != 255


def _opaque(image: PIL.Image.Image) -> PIL.Image.Image:
    """The colors, as RGB, of a picture that has no transparent pixel."""
    return (image.convert("RGBA") if _has_alpha(image) else image).convert("RGB")


def _packed(image: PIL.Image.Image) -> ImageInput:
    return ImageInput(image.width, image.height, len(image.getbands()), image.tobytes())
