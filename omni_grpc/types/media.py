"""Media: the formats that outputs are encoded in, decoded inputs, and previews. Plain frozen data."""

from __future__ import annotations

import dataclasses
import enum


class ImageFormat(enum.StrEnum):
    """How an image is encoded. RAW_RGB8 is height x width x 3 bytes, row by row, for callers on the same network."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    RAW_RGB8 = "RAW_RGB8"

    @property
    def mime_type(self) -> str:
        return "application/octet-stream" if self is ImageFormat.RAW_RGB8 else f"image/{self.value.lower()}"


class VideoFormat(enum.StrEnum):
    """How a video is encoded: H.264 in MP4 with its index in front, VP9 in WebM, or H.264 in fragmented MP4."""

    MP4 = "MP4"
    WEBM = "WEBM"
    FMP4 = "FMP4"

    @property
    def mime_type(self) -> str:
        return "video/webm" if self is VideoFormat.WEBM else "video/mp4"


class AudioFormat(enum.StrEnum):
    """How sound is encoded: 16-bit PCM, lossless, or lossy (Opus in an Ogg container)."""

    WAV = "WAV"
    FLAC = "FLAC"
    MP3 = "MP3"
    OPUS = "OPUS"

    @property
    def mime_type(self) -> str:
        return {"WAV": "audio/wav", "FLAC": "audio/flac", "MP3": "audio/mpeg", "OPUS": "audio/ogg"}[self.value]


OutputFormat = ImageFormat | VideoFormat | AudioFormat


class Modality(enum.StrEnum):
    """What a task makes."""

    IMAGE = "IMAGE"
    VIDEO = "VIDEO"
    AUDIO = "AUDIO"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Pictures of the state between steps: a linear map from latent channels to RGB, one every `every_steps` steps.

    `max_edge_px` is the longer side in pixels at most.
    """

    every_steps: int = 1
    max_edge_px: int = 256
    format: ImageFormat = ImageFormat.WEBP


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewImage:
    """One encoded preview of one output."""

    index: int
    mime_type: str
    data: bytes
    width: int
    height: int


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInput:
    """A decoded picture: height x width x channels bytes, row by row; 1 channel is a mask, 3 RGB, 4 RGB with alpha.

    `block`, here and below, is the shared-memory block that the bytes are in while the request waits; `data` is empty
    then.
    """

    width: int
    height: int
    channels: int
    data: bytes = dataclasses.field(repr=False)
    block: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class VideoInput:
    """A decoded video: frames x height x width x 3 bytes, RGB."""

    width: int
    height: int
    num_frames: int
    fps: float
    data: bytes = dataclasses.field(repr=False)
    block: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AudioInput:
    """Decoded sound: channels x samples little-endian float32 in -1..1, one channel after the other."""

    channels: int
    sample_rate: int
    data: bytes = dataclasses.field(repr=False)
    block: str = ""


DecodedInput = ImageInput | VideoInput | AudioInput

TRANSPARENT_MASK = "transparent_mask"
"""An input that goes to `Inputs.mask`, and says by its transparency what is made anew, as OpenAI's masks do."""


def field_of(name: str) -> str:
    """The field of Inputs that an input of this name goes to."""
    return "mask" if name == TRANSPARENT_MASK else name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The decoded media of a request; what it does not have is None or empty."""

    images: tuple[ImageInput, ...] = ()
    mask: ImageInput | None = None
    first_frame: ImageInput | None = None
    last_frame: ImageInput | None = None
    reference_images: tuple[ImageInput, ...] = ()
    source_video: VideoInput | None = None
    control_video: VideoInput | None = None
    mask_video: VideoInput | None = None
    audio: AudioInput | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the inputs that are set."""
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name))
