"""Encodes outputs in the worker, so that the server process never does."""

from __future__ import annotations

import io
import resource
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from omni_grpc.request import ImageFormat

Image = npt.NDArray[np.uint8]
"""Height x width x 3, RGB."""

_OPTIONS: Mapping[ImageFormat, Mapping[str, int]] = {
    # level 1 is three times as fast as the default for a few per cent more bytes
    ImageFormat.PNG: {"compress_level": 1},
    ImageFormat.JPEG: {"quality": 95, "subsampling": 0},
    ImageFormat.WEBP: {"quality": 95},
}


_PREVIEW_OPTIONS: Mapping[ImageFormat, Mapping[str, int]] = {
    ImageFormat.PNG: {"compress_level": 1},
    ImageFormat.JPEG: {"quality": 75},
    ImageFormat.WEBP: {"quality": 75, "method": 0},
}


def encode(image: Image, format: ImageFormat, *, preview: bool = False) -> bytes:
    """The image as a file of that format; RAW_RGB8 is the pixels alone. A preview is small before it is good."""
    if format is ImageFormat.RAW_RGB8:
        return image.tobytes()
    buffer = io.BytesIO()
    options = (_PREVIEW_OPTIONS if preview else _OPTIONS)[format]
    PIL.Image.fromarray(image).save(buffer, format.value, **options)
    return buffer.getvalue()


def fit(image: Image, edge: int) -> Image:
    """The image scaled so that its longer side is `edge` pixels."""
    height, width, _ = image.shape
    scale = edge / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(PIL.Image.fromarray(image).resize(size, PIL.Image.Resampling.BICUBIC))


def peak_memory_bytes() -> int:
    """The most memory the worker has held: of the device where it runs on one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # ru_maxrss is in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
