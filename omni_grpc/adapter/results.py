"""Warnings about what a session made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omni_grpc.adapter.describe import fps, frames_used
from omni_grpc.adapter.member import Member
from omni_grpc.adapter.outputs import blanked
from omni_grpc.pipeline.outputs import Output
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.worker import delivery, media


def warnings(
    member: Member, request: Request, outputs: Sequence[Output], result: Any, *, previews: bool
) -> tuple[RequestWarning, ...]:
    """What came out differently than asked. `result` is what the pipeline returned; `previews`: they were as asked."""
    found = [*_of_pixels(member, request, outputs), *_of_sound(member, request, outputs)]
    for field in ("prompt", "negative_prompt"):
        if request.extra.get(f"{field}_embeds") is not None and getattr(request, field):
            message = f"extra.{field}_embeds was used in its place"
            found.append(RequestWarning(code="PROMPT_WITHOUT_EFFECT", field=field, message=message))
    for index in blanked(result):
        message = f"the pipeline's safety checker replaced output {index} by a black picture"
        found.append(RequestWarning(code="OUTPUT_BLANKED", field="prompt", message=message))
    if not previews:
        why = member.previews.unavailable
        found.append(RequestWarning(code="PREVIEW_NOT_AVAILABLE", field="options.preview", message=why))
    if any(image.channels == 4 for image in request.inputs.images) and "Layered" not in member.name:
        message = "transparent parts of the input were laid on white"
        found.append(RequestWarning(code="ALPHA_FLATTENED", field="images", message=message))
    return tuple(found)


def of_randomness(member: Member, request: Request, *, shared: bool) -> tuple[RequestWarning, ...]:
    """A warning where several outputs share random numbers, so that none is what its seed gives alone."""
    if not shared or request.num_outputs == 1:
        return ()
    message = (
        f"{member.name} drew random numbers for all outputs together; the same request gives the same outputs, but "
        "none of them is the one that its seed gives alone. For that, ask for one output at a time"
    )
    return (RequestWarning(code="RANDOMNESS_SHARED", field="sampling.seeds", message=message),)


def _of_pixels(member: Member, request: Request, outputs: Sequence[Output]) -> list[RequestWarning]:
    pixels, found = outputs[0].pixels, []
    if pixels is None:
        return []
    height, width = pixels.shape[-3:-1]
    if (width, height) != (request.width, request.height):
        asked, made = f"{request.width} x {request.height}", f"{width} x {height}"
        found.append(_changed("SIZE_ROUNDED", "width, height", f"{member.name} made {made} of {asked}", asked, made))
    if member.able.modality is not Modality.VIDEO:
        return found
    found += delivery.rounded(outputs[0], request)
    source = request.inputs.source_video
    if source is not None and (used := frames_used(member.pipeline, source, len(pixels))) < source.num_frames:
        message = f"{member.name} used its first {used} frames"
        found.append(_changed("SOURCE_TRIMMED", "source_video", message, str(source.num_frames), str(used)))
    return found


def _of_sound(member: Member, request: Request, outputs: Sequence[Output]) -> list[RequestWarning]:
    found, rate = [], _rate(member, request)
    sounding = any(output.samples is not None for output in outputs)
    if sounding and outputs[0].pixels is not None and request.output_fps not in (None, rate):
        message = f"the video was made for {rate:g} frames per second; its sound keeps the time of that"
        found.append(_changed("SOUND_OUT_OF_STEP", "output_fps", message, f"{request.output_fps:g}", f"{rate:g}"))
    clipped = sum(media.count_clipped(np.asarray(o.samples)) for o in outputs if o.samples is not None)
    if clipped:
        message = f"{clipped} samples were beyond full scale and were clipped"
        found.append(RequestWarning(code="SOUND_CLIPPED", field="", message=message))
    return found


def _rate(member: Member, request: Request) -> float:
    """Frames per second that a video was made for."""
    return request.fps or fps(member.pipeline, member.signature)


def _changed(code: str, field: str, message: str, requested: str, applied: str) -> RequestWarning:
    return RequestWarning(code=code, field=field, message=message, requested=requested, applied=applied)
