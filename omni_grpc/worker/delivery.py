"""Delivery: encodes outputs and puts them into shared memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from omni_grpc.metadata import embedded
from omni_grpc.pipeline.outputs import Output
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.effective import effective
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.memory_model import MemoryModel
from omni_grpc.types.parameters import NotEmbedded, Parameters
from omni_grpc.types.plan import Media, VisitedLevels
from omni_grpc.types.request import Request
from omni_grpc.types.requested import Embedding
from omni_grpc.types.results import RequestWarning
from omni_grpc.worker import media


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedOutput:
    """An encoded output, and what is in it: pixels, frames per second, Hz, seconds."""

    data: bytes
    width: int = 0
    height: int = 0
    num_frames: int = 0
    fps: float = 0.0
    sample_rate_hz: int = 0
    duration: float = 0.0
    has_alpha: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a request went in the worker: steps of each part, denoiser forwards of all, by field of the prompt the
    tokens that did not fit, and the noise levels of each part.
    """

    steps: int
    evals: int
    dropped_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    levels: VisitedLevels = dataclasses.field(default_factory=VisitedLevels)


@dataclasses.dataclass(frozen=True, slots=True)
class Delivered:
    """The files of a request in shared memory, and what to tell about them."""

    media: tuple[Media, ...]
    warnings: tuple[RequestWarning, ...]


def tiled(request: Request, memory: MemoryModel) -> tuple[RequestWarning, ...]:
    """A warning for outputs that were decoded in tiles: they are not quite what they would be otherwise."""
    if not memory.in_tiles(request):
        return ()
    why = "--vae-use-tiling is set" if memory.always_tiled else "decoded whole, they would not fit in device memory"
    message = (
        f"the outputs were decoded in tiles that are blended, because {why}; near their edges they differ a little"
    )
    return (RequestWarning(code="VAE_TILED", field="", message=message, applied="tiles"),)


def encode(output: Output, request: Request, *, fps: float = 0.0, sample_rate: int = 0) -> EncodedOutput:
    """The output as a file of the request's format. `fps` and `sample_rate` are what the model makes; the request may
    want others in the file.
    """
    match request.output_format:
        case ImageFormat() as image:
            assert output.pixels is not None
            height, width, channels = output.pixels.shape
            has_alpha = channels == 4 and media.keeps_alpha(image)
            return EncodedOutput(
                data=media.encode(output.pixels, image), width=width, height=height, has_alpha=has_alpha
            )
        case VideoFormat() as video:
            assert output.pixels is not None
            frames, height, width, _ = output.pixels.shape
            rate = request.output_fps or request.fps or fps
            sound = None if output.samples is None else (output.samples, sample_rate)
            width, height = media.encoded_size(width, height, video)
            return EncodedOutput(
                data=media.encode_video(output.pixels[..., :3], rate, video, sound),
                width=width,
                height=height,
                num_frames=frames,
                fps=float(media.frame_rate(rate)),
                sample_rate_hz=0 if sound is None else media.encoded_rate(video, sound[1]),
                duration=frames / rate,
            )
        case AudioFormat() as audio:
            assert output.samples is not None
            return EncodedOutput(
                data=media.encode_audio(output.samples, sample_rate, audio, request.sample_rate_hz),
                sample_rate_hz=media.encoded_rate(audio, request.sample_rate_hz or sample_rate),
                duration=output.samples.shape[1] / sample_rate,
            )


def rounded(output: Output, request: Request) -> tuple[RequestWarning, ...]:
    """The warning for a video with another number of frames than asked for: it is made of whole chunks, less the frames
    that their decoder drops.
    """
    if output.pixels is None or request.num_frames in (None, len(output.pixels)):
        return ()
    warning = RequestWarning(
        code="FRAMES_ROUNDED",
        field="num_frames",
        message=f"the model made {len(output.pixels)} of {request.num_frames}",
        requested=str(request.num_frames),
        applied=str(len(output.pixels)),
    )
    return (warning,)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which output of a request a file is, and which layer of it; None where there are no layers."""

    output: int
    layer: int | None


class Delivery:
    """Puts the files of one runner into shared memory. `prefix` begins the name of every block, or is NO_BLOCKS;
    `scheduler` is the checkpoint's own, and `found` tells what was found out about the model so far,
    for the parameters in files.
    """

    def __init__(
        self, prefix: str, *, scheduler: str = "", found: Callable[[], WorkerFindings] = WorkerFindings
    ) -> None:
        self._prefix = prefix
        self._scheduler = scheduler
        self._found = found
        self._blocks = itertools.count()

    def put(self, request: Request, files: Sequence[EncodedOutput], course: Course) -> Delivered:
        """All files of a request, output by output; where there are several for each, they are its layers. Where the
        request asks for it, they have the parameters of their generation in them.
        """
        each = -(-len(files) // request.num_outputs)
        layered = each > 1 or bool(request.layers)
        places = [Place(index // each, index % each if layered else None) for index in range(len(files))]
        warnings: tuple[RequestWarning, ...] = ()
        if request.embedding is not None:
            # before any is put in shared memory: a block belongs to a report
            files, warnings = self._embed(request, request.embedding, files, places, course)
        return Delivered(tuple(map(functools.partial(self._media, request), files, places)), warnings)

    def _media(self, request: Request, file: EncodedOutput, place: Place) -> Media:
        return Media(
            index=place.output,
            layer=place.layer,
            data=shared.hand(file.data, self._prefix, next(self._blocks)),
            mime_type=request.output_format.mime_type,
            width=file.width,
            height=file.height,
            seed=request.seeds[place.output],
            sha256=hashlib.sha256(file.data).hexdigest(),
            num_frames=file.num_frames,
            fps=file.fps,
            sample_rate=file.sample_rate_hz,
            duration=file.duration,
            has_alpha=file.has_alpha,
        )

    def _embed(
        self,
        request: Request,
        embedding: Embedding,
        files: Sequence[EncodedOutput],
        places: Sequence[Place],
        course: Course,
    ) -> tuple[list[EncodedOutput], tuple[RequestWarning, ...]]:
        """The files with their parameters, and a warning for each that cannot take them and stays as it is."""
        done = effective(
            request,
            files[0],
            steps=course.steps,
            evals=course.evals,
            scheduler=self._scheduler,
            found=self._found(),
            defaults_used=embedding.defaults_used,
            levels=course.levels,
            dropped_tokens=course.dropped_tokens,
        )
        written, warnings = [], []
        for file, place in zip(files, places, strict=True):
            try:
                parameters = Parameters.of(
                    embedding.asked, done, seed=request.seeds[place.output], index=place.output, layer=place.layer
                )
                data = embedded(file.data, request.output_format, parameters.text(), parameters.infotext())
            except NotEmbedded as error:
                warnings.append(_not_embedded(place, error))
                data = file.data
            written.append(dataclasses.replace(file, data=data))
        return written, tuple(warnings)


def _not_embedded(place: Place, error: NotEmbedded) -> RequestWarning:
    which = f"output {place.output}" if place.layer is None else f"layer {place.layer} of output {place.output}"
    return RequestWarning(
        code="PARAMETERS_NOT_EMBEDDED",
        field="options.embed_parameters",
        message=f"{which} is without its parameters: {error}",
    )
