"""Delivery: encodes outputs and puts them into shared memory."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

from omni_grpc.pipeline.outputs import Output
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.plan import Media
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.worker import media


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedOutput:
    """An encoded output. `about` are the fields of Media that say what is in it."""

    data: bytes
    about: dict[str, Any]


def encode(output: Output, request: Request, *, fps: float = 0.0, sample_rate: int = 0) -> EncodedOutput:
    """The output as a file of the request's format. `fps` and `sample_rate` are what the model makes; the request may
    want others in the file.
    """
    match request.output_format:
        case ImageFormat() as image:
            assert output.pixels is not None
            height, width, channels = output.pixels.shape
            has_alpha = channels == 4 and media.keeps_alpha(image)
            about: dict[str, Any] = {"width": width, "height": height, "has_alpha": has_alpha}
            return EncodedOutput(media.encode(output.pixels, image), about)
        case VideoFormat() as video:
            assert output.pixels is not None
            frames, height, width, _ = output.pixels.shape
            rate = request.output_fps or request.fps or fps
            sound = None if output.samples is None else (output.samples, sample_rate)
            width, height = media.encoded_size(width, height, video)
            about = {"width": width, "height": height, "num_frames": frames, "duration": frames / rate}
            about["fps"] = float(media.frame_rate(rate))
            if sound is not None:
                about["sample_rate"] = media.encoded_rate(video, sound[1])
            return EncodedOutput(media.encode_video(output.pixels[..., :3], rate, video, sound), about)
        case AudioFormat() as audio:
            assert output.samples is not None
            target = media.encoded_rate(audio, request.sample_rate_hz or sample_rate)
            data = media.encode_audio(output.samples, sample_rate, audio, request.sample_rate_hz)
            duration = output.samples.shape[1] / sample_rate
            return EncodedOutput(data, {"width": 0, "height": 0, "sample_rate": target, "duration": duration})


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


class Delivery:
    """Puts the files of one runner into shared memory. `prefix` begins the name of every block."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._blocks = itertools.count()

    def put(self, request: Request, files: Sequence[EncodedOutput]) -> tuple[Media, ...]:
        """All files of a request, output by output; where there are several for each, they are its layers."""
        each = -(-len(files) // request.num_outputs)
        places = [divmod(index, each) for index in range(len(files))]
        return tuple(
            Media(
                index=output,
                layer=layer if each > 1 or request.layers else None,
                data=shared.put(file.data, f"{self._prefix}{next(self._blocks)}"),
                mime_type=request.output_format.mime_type,
                seed=request.seeds[output],
                sha256=hashlib.sha256(file.data).hexdigest(),
                **file.about,
            )
            for (output, layer), file in zip(places, files, strict=True)
        )
