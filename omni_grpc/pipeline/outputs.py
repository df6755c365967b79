"""Decoded outputs as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omni_grpc.ops.image import pixels_to_bytes
from omni_grpc.types.errors import InternalError

Pixels = NDArray[np.uint8]
Samples = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output. pixels: [height, width, 3 or 4] or [frames, height, width, 3]; samples: [channels, n]."""

    pixels: Pixels | None = None
    samples: Samples | None = None


def join(parts: Sequence[Output]) -> Output:
    """Concatenates the segments of one output in time: the frames of a video, the samples of a sound."""
    if len(parts) == 1:
        return parts[0]
    pixels = [part.pixels for part in parts if part.pixels is not None]
    samples = [part.samples for part in parts if part.samples is not None]
    return Output(
        pixels=np.concatenate(pixels) if pixels else None, samples=np.concatenate(samples, axis=1) if samples else None
    )


def postprocess(decoded: Tensor) -> Output:
    """Output of a decoded image [3, height, width] or video [frames, 3, height, width] in -1..1: see to_uint8."""
    return Output(pixels=to_uint8(decoded))


def to_uint8(pixels: Tensor) -> Pixels:
    """Pixels [..., 3, height, width] in -1..1 -> uint8 [..., height, width, 3]. Values outside are clipped.

    Raises InternalError for values that are not finite: an image of them would look like a result.
    """
    made, nonfinite = pixels_to_bytes(pixels.reshape(-1, *pixels.shape[-3:]))
    if nonfinite.item():
        raise InternalError("the decoded pixels have values that are not finite", reason="NOT_FINITE")
    array: Pixels = made.view(*pixels.shape[:-3], *made.shape[1:]).cpu().numpy()
    return array
