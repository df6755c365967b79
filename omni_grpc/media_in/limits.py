"""How large an input may be."""

from __future__ import annotations

import dataclasses

from omni_grpc.config import LimitsConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What one input may hold. `max_pixels` is width x height of an image or a frame, `max_video_pixels` is that times
    the number of frames; both are checked against the header before anything is decoded.
    """

    max_bytes: int
    max_pixels: int
    max_frames: int
    max_video_pixels: int
    max_seconds: float

    @classmethod
    def of(cls, config: LimitsConfig) -> MediaLimits:
        return cls(
            max_bytes=config.max_input_bytes,
            max_pixels=config.max_input_pixels,
            max_frames=config.max_input_frames,
            max_video_pixels=config.max_input_video_pixels,
            max_seconds=config.max_input_seconds,
        )
