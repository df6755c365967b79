"""What a generation gave."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats

if TYPE_CHECKING:
    import PIL.Image

EXTENSIONS: Mapping[str, ImageFormat] = {
    ".png": ImageFormat.PNG,
    ".jpg": ImageFormat.JPEG,
    ".jpeg": ImageFormat.JPEG,
    ".webp": ImageFormat.WEBP,
    ".rgb": ImageFormat.RAW_RGB8,
}
"""File name extension -> the image format that it stands for."""
VIDEO_EXTENSIONS: Mapping[str, VideoFormat] = {".mp4": VideoFormat.MP4, ".webm": VideoFormat.WEBM}
AUDIO_EXTENSIONS: Mapping[str, AudioFormat] = {
    ".wav": AudioFormat.WAV,
    ".flac": AudioFormat.FLAC,
    ".mp3": AudioFormat.MP3,
    ".opus": AudioFormat.OPUS,
    ".ogg": AudioFormat.OPUS,
}
_ALL: Mapping[str, OutputFormat] = {**EXTENSIONS, **VIDEO_EXTENSIONS, **AUDIO_EXTENSIONS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaResult:
    """The encoded outputs, by index, and the truth about how they were made."""

    job_id: str
    files: tuple[bytes, ...]
    artifacts: tuple[Artifact, ...]
    effective: Effective
    warnings: tuple[RequestWarning, ...]
    stats: Stats

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each output: the same request with this seed and num_outputs=1 makes it again."""
        return tuple(artifact.seed for artifact in self.artifacts)

    def save(self, path: str | Path) -> list[Path]:
        """Writes the outputs as they came, and returns where: `path`, or path-0, path-1... where there are several.

        Raises InvalidArgument for a path whose extension stands for another format than the outputs have.
        """
        suffix, own = Path(path).suffix.lower(), self.effective.output_format
        # a fragmented MP4 is an MP4 to whoever opens it
        stands_for = VideoFormat.MP4 if own is VideoFormat.FMP4 else own
        if _ALL.get(suffix) is not stands_for:
            fits = " or ".join(name for name, kind in _ALL.items() if kind is stands_for)
            rule = f"ends in {suffix or 'no extension'}, but the outputs are {own}; use {fits}"
            raise InvalidArgument(f"path {path} {rule}", violations=(Violation("path", rule),))
        return write_files(self.files, Path(path))


class ImageResult(MediaResult):
    """Images."""

    @functools.cached_property
    def images(self) -> list[PIL.Image.Image]:
        """The outputs, decoded at the first look."""
        import PIL.Image

        if self.effective.output_format is ImageFormat.RAW_RGB8:
            sizes = [(artifact.width, artifact.height) for artifact in self.artifacts]
            return [PIL.Image.frombytes("RGB", size, data) for size, data in zip(sizes, self.files, strict=True)]
        images: list[PIL.Image.Image] = [PIL.Image.open(io.BytesIO(data)) for data in self.files]
        for image in images:
            image.load()
        return images


class VideoResult(MediaResult):
    """Videos. Their length and rates are in `artifacts` (num_frames, fps, duration)."""


class AudioResult(MediaResult):
    """Sounds. Their length and rate are in `artifacts` (duration, sample_rate)."""


RESULTS: Mapping[type[OutputFormat], type[MediaResult]] = {
    ImageFormat: ImageResult,
    VideoFormat: VideoResult,
    AudioFormat: AudioResult,
}
"""What a result is, by the kind of its format."""


def write_files(files: Sequence[bytes], path: Path) -> list[Path]:
    """Writes each file, numbered before the extension where there are several, and returns the paths."""
    paths = [path] if len(files) == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(len(files))]
    for target, data in zip(paths, files, strict=True):
        target.write_bytes(data)
    return paths
