"""The result of a generation."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omni_grpc.client.extras import needs
from omni_grpc.client.saving import save
from omni_grpc.types.errors import InvalidArgument, OmniError
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.requested import Requested
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import PIL.Image


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaResult:
    """The encoded outputs, by index, and the parameters that were really used."""

    job_id: str
    files: tuple[bytes, ...]
    artifacts: tuple[Artifact, ...]
    effective: Effective
    warnings: tuple[RequestWarning, ...]
    stats: Stats
    asked: Requested | None = None
    """What the client asked for; None for a job that it watched, whose request it does not know."""
    trace_id: str = ""
    """The trace that the server has put the job in; empty where it traces nothing, and for a job that was watched."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each output. The same request with this seed and num_outputs=1 reproduces it."""
        return tuple(artifact.seed for artifact in self.artifacts)

    def save(self, path: str | Path, *, metadata: bool = True) -> list[Path]:
        """Writes the encoded outputs and returns their paths: `path`, or path-0, path-1... if there are several. In a
        folder that exists they are called NUMBER-SEED.EXT, and no file there is overwritten.

        With `metadata`, the parameters of the generation are written into the files, where `asked` is known and the
        format has a place for them; a warning (ParametersNotWritten) says where they could not be. Pixels and samples
        stay as they are. A file into which the server wrote them (`embed_parameters`) is written as received. Without
        `metadata`, all are.

        Raises InvalidArgument if the extension of `path` is that of another format, ResourceExhausted (DISK_FULL) or
        FailedPrecondition (FILE_NOT_WRITTEN) if a file cannot be written; then no part of it is left, and its bytes are
        still in `files`.
        """
        try:
            return save(self, Path(path), metadata=metadata)
        except InvalidArgument:
            raise
        except OmniError as error:
            ids = ", ".join(artifact.artifact_id for artifact in self.artifacts)
            error.add_note(f"the outputs are in `files`, and still on the server: client.download of {ids}")
            raise


class ImageResult(MediaResult):
    """The result of generating or editing images."""

    @functools.cached_property
    def images(self) -> list[PIL.Image.Image]:
        """The outputs as PIL images, decoded on first access."""
        with needs("media"):
            import PIL.Image

        if self.effective.output_format is ImageFormat.RAW_RGB8:
            sizes = [(artifact.width, artifact.height) for artifact in self.artifacts]
            return [PIL.Image.frombytes("RGB", size, data) for size, data in zip(sizes, self.files, strict=True)]
        images: list[PIL.Image.Image] = [PIL.Image.open(io.BytesIO(data)) for data in self.files]
        for image in images:
            image.load()
        return images

    def array(self) -> npt.NDArray[np.float32]:
        """The outputs as one array of float32 from 0 to 1, [outputs, height, width, 3]."""
        with needs("media"):
            import numpy as np

        return np.stack([np.asarray(image.convert("RGB"), dtype=np.float32) / 255 for image in self.images])


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
