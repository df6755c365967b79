"""Pictures that the caller holds in memory, encoded so that the decoder sees what it would see in their files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_grpc.client.extras import needs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import PIL.Image

_ORIENTATION = 0x0112
"""The EXIF tag that says how to turn the picture; 1 is upright."""

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
_TIFF_MODES = ("CMYK", "LAB", "F", "I")
"""What a PNG cannot hold. Whether these are converted or refused is the decoder's rule, as for a file."""

_MEMORY_ONLY: Mapping[str, str] = {
    "RGBa": "RGBA",
    "PA": "RGBA",
    "La": "LA",
    "RGBX": "RGB",
    "HSV": "RGB",
    "YCbCr": "RGB",
}
"""Modes that PIL's readers resolve or never give, and the equal or nearest one that a file can hold."""


class NotMedia(TypeError):
    """A picture or an array that cannot be sent. Its text is the rule, to be read after the name of the field."""


def encoded_picture(image: PIL.Image.Image) -> tuple[bytes, str]:
    """The picture as a lossless file, and its MIME type. Its EXIF orientation stays with it: the decoder turns it
    upright and says so, as it does for a file. Profiles, texts and other metadata stay out: no decoder here reads them.

    Raises NotMedia for a picture without pixels, whose file turns out to be broken, or of an unknown mode.
    """
    try:
        return _encoded(image)
    except NotMedia:
        raise
    except Exception as error:  # a lazily opened file is decoded only now, and a decoder raises anything
        kind = f"{image.format} file" if image.format else f"{image.mode} picture"
        raise NotMedia(f"is a {kind} that PIL cannot read: {error}; open it again, or send another one") from error


def _encoded(image: PIL.Image.Image) -> tuple[bytes, str]:
    if 0 in image.size:
        raise NotMedia(f"is a picture of {image.width} x {image.height} without pixels; send one that has some")
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)
    animated = getattr(image, "is_animated", False) and image.tell() == 0
    mode = _MEMORY_ONLY.get(image.mode, image.mode)
    if mode == "I" and image.format == "PNG":
        mode = "I;16"  # what PIL before 11 makes of a PNG of 16 bits
    # a copy, because a file that was opened would write all of its frames
    image = image.copy() if mode == image.mode else image.convert(mode)
    options: dict[str, Any] = {"icc_profile": None}
    if orientation != 1:
        exif = image.getexif()
        exif.clear()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif
    if mode in _PNG_MODES and not animated:
        return _saved(image, "PNG", options), "image/png"
    if mode not in (*_PNG_MODES, *_TIFF_MODES):
        raise NotMedia(f"is a picture of mode {mode}, which no file holds; convert it to RGB")
    if "transparency" in image.info:
        image = image.convert("RGBA")
    if animated:
        # a second page, so that the decoder says what it says of the file: only the first frame is used
        options |= {"save_all": True, "append_images": [image.resize((1, 1))]}
    return _saved(image, "TIFF", {"compression": "tiff_adobe_deflate"} | options), "image/tiff"


def _saved(image: PIL.Image.Image, kind: str, options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encoded_array(pixels: npt.NDArray[np.uint8]) -> tuple[bytes, str]:
    """The array as a PNG, and its MIME type: height x width is grey or a mask, x 3 RGB, x 4 RGB with alpha.

    Raises NotMedia for another dtype or shape.
    """
    shape = pixels.shape
    if pixels.dtype != "uint8" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))) or not pixels.size:
        raise NotMedia(
            f"is a numpy array of {pixels.dtype} with shape {shape}; send uint8 of (height, width), (height, width, 3)"
            " or (height, width, 4)"
        )
    # here, because whoever sends files needs no PIL
    with needs("media"):
        import PIL.Image

    return _saved(PIL.Image.fromarray(pixels), "PNG", {}), "image/png"
