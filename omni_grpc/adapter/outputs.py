"""What pipelines return, under their many names, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from omni_grpc.pipeline.outputs import Output, Pixels
from omni_grpc.types.errors import InternalError
from omni_grpc.types.media import Modality

PICTURES = ("images", "image", "frames", "videos", "video", "rgb")
SOUNDS = ("audios", "audio", "sound")


def unpack(result: Any, modality: Modality) -> list[Output]:
    """The outputs in a pipeline's return value. Raises InternalError for none, or for values that are not finite."""
    sounds = [_sound(value) for value in _items(_first(result, SOUNDS), dimensions=2)]
    if modality is Modality.AUDIO:
        return [Output(samples=sound) for sound in _some(sounds, result)]
    found = _first(result, PICTURES)
    if modality is Modality.VIDEO:
        videos = _some([_video(value) for value in _items(found, dimensions=4)], result)
        return [
            Output(pixels=video, samples=sounds[index] if index < len(sounds) else None)
            for index, video in enumerate(videos)
        ]
    return [Output(pixels=_pixels(value)) for value in _some(_pictures(found), result)]


def blanked(result: Any) -> tuple[int, ...]:
    """The outputs that a safety checker replaced by black pictures."""
    flags = getattr(result, "nsfw_content_detected", None)
    return tuple(index for index, flag in enumerate(flags) if flag) if isinstance(flags, list | tuple) else ()


def _first(result: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(result, name, None)) is not None), None)


def _some(items: list[Any], result: Any) -> list[Any]:
    if not items:
        names = ", ".join(getattr(result, "keys", dict)()) or type(result).__name__
        raise InternalError(f"the pipeline returned nothing that can be sent: {names}", reason="BAD_OUTPUT")
    return items


def _items(value: Any, *, dimensions: int) -> list[Any]:
    """The outputs of a batch; a value without a batch dimension is a single output."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        if dimensions == 4 and value and isinstance(value[0], PIL.Image.Image):
            return [value]
        return list(value)
    array = _array(value)
    return list(array) if array.ndim > dimensions or dimensions == 2 else [array]


def _pictures(value: Any) -> list[Any]:
    """Pictures one after the other, also where there is a list of layers for each output."""
    if isinstance(value, list | tuple):
        return [picture for part in value for picture in _pictures(part)]
    if value is None or isinstance(value, PIL.Image.Image):
        return [] if value is None else [value]
    array = _array(value)
    return list(array.reshape(-1, *array.shape[-3:]))


def _array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        return value.detach().float().cpu().numpy()
    return np.asarray(value)


def _pixels(value: Any) -> Pixels:
    """Pixels from 0..1 or bytes, rounded as diffusers rounds them; grey ones become RGB."""
    pixels = _array(value)
    if pixels.dtype != np.uint8:
        if not np.isfinite(pixels).all():
            raise InternalError("the output has pixels that are not finite", reason="NON_FINITE_OUTPUT")
        pixels = (pixels.clip(0, 1) * 255).round().astype(np.uint8)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    return np.ascontiguousarray(np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels)


def _video(value: Any) -> Pixels:
    if isinstance(value, list | tuple):
        return np.stack([_pixels(frame) for frame in value])
    return _pixels(value)


def _sound(value: Any) -> npt.NDArray[np.float32]:
    samples = _array(value).astype(np.float32)
    if not np.isfinite(samples).all():
        raise InternalError("the output has samples that are not finite", reason="NON_FINITE_OUTPUT")
    return np.ascontiguousarray(samples.reshape(-1, samples.shape[-1]))
