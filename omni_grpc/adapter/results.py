"""What a session made, as files, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omni_grpc.adapter.describe import fps, frames_used, sample_rate
from omni_grpc.adapter.member import Member
from omni_grpc.adapter.outputs import Output, blanked
from omni_grpc.request import AudioFormat, ImageFormat, Modality, Request, RequestWarning, VideoFormat
from omni_grpc.worker import media


def encode(member: Member, request: Request, output: Output) -> tuple[bytes, dict[str, Any]]:
    """The file, and the fields of Media that say what is in it."""
    match request.output_format:
        case ImageFormat() as image:
            assert output.pixels is not None
            height, width, channels = output.pixels.shape
            has_alpha = channels == 4 and media.keeps_alpha(image)
            return media.encode(output.pixels, image), {"width": width, "height": height, "has_alpha": has_alpha}
        case VideoFormat() as video:
            assert output.pixels is not None
            frames, height, width, _ = output.pixels.shape
            rate = request.output_fps or _rate(member, request)
            sound = None if output.samples is None else (output.samples, sample_rate(member.pipeline))
            width, height = media.encoded_size(width, height, video)
            about = {"width": width, "height": height, "num_frames": frames, "duration": frames / rate}
            about["fps"] = float(media.frame_rate(rate))
            if sound is not None:
                about["sample_rate"] = media.encoded_rate(video, sound[1])
            return media.encode_video(output.pixels[..., :3], rate, video, sound), about
        case AudioFormat() as audio:
            assert output.samples is not None
            rate_hz = sample_rate(member.pipeline)
            target = media.encoded_rate(audio, request.sample_rate or rate_hz)
            data = media.encode_audio(output.samples, rate_hz, audio, request.sample_rate)
            duration = output.samples.shape[1] / rate_hz
            return data, {"width": 0, "height": 0, "sample_rate": target, "duration": duration}


def warnings(
    member: Member, request: Request, outputs: Sequence[Output], result: Any, *, previews: bool
) -> tuple[RequestWarning, ...]:
    """What came out differently than asked. `result` is what the pipeline returned; `previews`: they were as asked."""
    found = [*_of_pixels(member, request, outputs), *_of_sound(member, request, outputs)]
    for field in ("prompt", "negative_prompt"):
        if f"{field}_embeds" in request.extra and getattr(request, field):
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
    asked, made = str(request.num_frames), str(len(pixels))
    if request.num_frames is not None and asked != made:
        found.append(_changed("FRAMES_ROUNDED", "num_frames", f"{member.name} made {made} of {asked}", asked, made))
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
