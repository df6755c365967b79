"""The result of a generation."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni_grpc.types.errors import InvalidArgument, OmniError, Violation
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.output_files import write_file
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
"""File name extension -> image format."""
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
    """The encoded outputs, by index, and the parameters that were really used."""

    job_id: str
    files: tuple[bytes, ...]
    artifacts: tuple[Artifact, ...]
    effective: Effective
    warnings: tuple[RequestWarning, ...]
    stats: Stats

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each output. The same request with this seed and num_outputs=1 reproduces it."""
        return tuple(artifact.seed for artifact in self.artifacts)

    def save(self, path: str | Path) -> list[Path]:
        """Writes the encoded outputs and returns their paths: `path`, or path-0, path-1... if there are several.

        Raises InvalidArgument if the extension of `path` is that of another format, ResourceExhausted (DISK_FULL) or
        FailedPrecondition (FILE_NOT_WRITTEN) if a file cannot be written; then no part of it is left, and its bytes are
        still in `files`.
        """
        suffix, own = Path(path).suffix.lower(), self.effective.output_format
        # to a player, a fragmented MP4 is an MP4
        wanted = VideoFormat.MP4 if own is VideoFormat.FMP4 else own
        if _ALL.get(suffix) is not wanted:
            fits = " or ".join(name for name, kind in _ALL.items() if kind is wanted)
            rule = f"ends in {suffix or 'no extension'}, but the outputs are {own}; use {fits}"
            raise InvalidArgument(f"path {path} {rule}", violations=(Violation("path", rule),))
        try:
            return write_files(self.files, Path(path))
        except OmniError as error:
            ids = ", ".join(artifact.artifact_id for artifact in self.artifacts)
            error.add_note(f"the outputs are in `files`, and still on the server: client.download of {ids}")
            raise


class ImageResult(MediaResult):
    """The result of generating or editing images."""

    @functools.cached_property
    def images(self) -> list[PIL.Image.Image]:
        """The outputs as PIL images, decoded on first access."""
        import PIL.Image

        if self.effective.output_format is ImageFormat.RAW_RGB8:
            sizes = [(artifact.width, artifact.height) for artifact in self.artifacts]
            return [PIL.Image.frombytes("RGB", size, data) for size, data in zip(sizes, self.files, strict=True)]
        images: list[PIL.Image.Image] = [PIL.Image.open(io.BytesIO(data)) for data in self.files]
        for image in images:
            image.load()
        return images


class VideoResult(MediaResult):
    """The result of generating videos. `artifacts` has their num_frames, fps and duration."""


class AudioResult(MediaResult):
    """The result of generating audio. `artifacts` has its duration and sample_rate_hz."""


RESULTS: Mapping[type[OutputFormat], type[MediaResult]] = {
    ImageFormat: ImageResult,
    VideoFormat: VideoResult,
    AudioFormat: AudioResult,
}
"""Type of the output format -> type of the result."""


def write_files(files: Sequence[bytes], path: Path) -> list[Path]:
    """Writes each file and returns the paths, which are numbered before the extension if there are several."""
    paths = output_paths(path, len(files))
    for target, data in zip(paths, files, strict=True):
        write_file(target, data)
    return paths


def output_paths(path: Path, count: int) -> list[Path]:
    """The path of each output: `path`, or path-0, path-1... if there are several."""
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]
