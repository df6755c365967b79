"""From a request message to what the engine takes. What is not set stays None; zero and "" are values like others.

The media that a request brings along are read by `media.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from omni_grpc.engine import Submission
from omni_grpc.server.served import EDIT_IMAGE, GENERATE_AUDIO, GENERATE_IMAGE, GENERATE_VIDEO, refuse_unserved
from omni_grpc.types.adapters_and_caches import CacheDraft, Lora
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.media import AudioFormat, ImageFormat, Preview, VideoFormat
from omni_grpc.types.request import Draft, GuidanceDraft, GuidanceNorm, Task
from omni_grpc.v1 import event_pb2, generation_pb2, media_pb2, options_pb2, sampling_pb2

T = TypeVar("T")

MAX_ID_CHARS = 128
MAX_LABELS = 64
MAX_PRIORITY = 100
MAX_RETENTION = 24 * 3600.0
"""Longest time, in seconds, that a request may have its job kept."""

NORMS: Mapping[int, GuidanceNorm | None] = {
    sampling_pb2.GUIDANCE_NORM_UNSPECIFIED: None,
    sampling_pb2.GUIDANCE_NORM_NONE: GuidanceNorm.NONE,
    sampling_pb2.GUIDANCE_NORM_RENORM: GuidanceNorm.RENORM,
    sampling_pb2.GUIDANCE_NORM_RENORM_CLIPPED: GuidanceNorm.RENORM_CLIPPED,
}
IMAGE_FORMATS: Mapping[int, ImageFormat | None] = {
    media_pb2.IMAGE_FORMAT_UNSPECIFIED: None,
    media_pb2.IMAGE_FORMAT_PNG: ImageFormat.PNG,
    media_pb2.IMAGE_FORMAT_JPEG: ImageFormat.JPEG,
    media_pb2.IMAGE_FORMAT_WEBP: ImageFormat.WEBP,
    media_pb2.IMAGE_FORMAT_RAW_RGB8: ImageFormat.RAW_RGB8,
}
VIDEO_FORMATS: Mapping[int, VideoFormat | None] = {
    media_pb2.VIDEO_FORMAT_UNSPECIFIED: None,
    media_pb2.VIDEO_FORMAT_MP4: VideoFormat.MP4,
    media_pb2.VIDEO_FORMAT_WEBM: VideoFormat.WEBM,
    media_pb2.VIDEO_FORMAT_FMP4: VideoFormat.FMP4,
}
AUDIO_FORMATS: Mapping[int, AudioFormat | None] = {
    media_pb2.AUDIO_FORMAT_UNSPECIFIED: None,
    media_pb2.AUDIO_FORMAT_WAV: AudioFormat.WAV,
    media_pb2.AUDIO_FORMAT_FLAC: AudioFormat.FLAC,
    media_pb2.AUDIO_FORMAT_MP3: AudioFormat.MP3,
    media_pb2.AUDIO_FORMAT_OPUS: AudioFormat.OPUS,
}
CANCELS: Mapping[int, bool | None] = {
    options_pb2.DISCONNECT_POLICY_UNSPECIFIED: None,
    options_pb2.DISCONNECT_POLICY_CANCEL: True,
    options_pb2.DISCONNECT_POLICY_KEEP: False,
}
INLINE: Mapping[int, bool | None] = {
    options_pb2.ARTIFACT_DELIVERY_UNSPECIFIED: None,
    options_pb2.ARTIFACT_DELIVERY_INLINE_CHUNKS: True,
    options_pb2.ARTIFACT_DELIVERY_REFERENCE: False,
}
PREVIEWS: Mapping[int, bool] = {
    options_pb2.PREVIEW_METHOD_UNSPECIFIED: False,
    options_pb2.PREVIEW_METHOD_NONE: False,
    options_pb2.PREVIEW_METHOD_LATENT_RGB: True,
}
PREVIEW_FORMATS: Mapping[int, ImageFormat | None] = {
    number: kind for number, kind in IMAGE_FORMATS.items() if kind is not ImageFormat.RAW_RGB8
}
NAMED_TASKS: Mapping[int, Task] = {
    number: Task(name.removeprefix("TASK_"))
    for name, number in sampling_pb2.Task.items()
    if number != sampling_pb2.TASK_UNSPECIFIED
}
TASKS: Mapping[int, Task | None] = {sampling_pb2.TASK_UNSPECIFIED: None, **NAMED_TASKS}
JOB_STATES: Mapping[int, str] = {
    number: name.removeprefix("JOB_STATE_")
    for name, number in event_pb2.JobState.items()
    if number != event_pb2.JOB_STATE_UNSPECIFIED
}


def refused(field: str, description: str) -> InvalidArgument:
    """The error for one field."""
    return InvalidArgument(f"{field}: {description}", violations=(Violation(field, description),))


class Reader:
    """Reads the fields of one message and gathers what is wrong with them; `check` raises it all at once."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    def refuse(self, field: str, description: str) -> None:
        self._violations.append(Violation(field, description))

    def check(self) -> None:
        """Raises InvalidArgument with every violation found so far."""
        if self._violations:
            message = "; ".join(f"{v.field}: {v.description}" for v in self._violations)
            raise InvalidArgument(message, violations=tuple(self._violations))

    def required(self, field: str, value: str) -> str:
        if not value:
            self.refuse(field, "is required")
        return value

    def text(self, field: str, value: str, most: int) -> str:
        if len(value) > most:
            self.refuse(field, f"has {len(value)} characters, the most is {most}")
        return value

    def choice(self, field: str, kind: EnumTypeWrapper, value: int, served: Mapping[int, T]) -> T | None:
        """What an enum value stands for. One that the enum lacks, or that is not served, is refused by name."""
        if value in served:
            return served[value]
        known = ", ".join(kind.Name(number) for number in served)
        name = kind.Name(value) if value in kind.values() else str(value)
        self.refuse(field, f"{name} is not served; served: {known}")
        return None

    def number(self, field: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            nearest = min(max(value, low), high)
            self.refuse(field, f"{value} is outside {low}..{high}; nearest legal value: {nearest}")
        return value

    def seconds(self, field: str, message: Message) -> float | None:
        """A Duration field in seconds, None where it is not set. Negative ones are refused."""
        name = field.rpartition(".")[2]
        if not message.HasField(name):
            return None
        value: Duration = getattr(message, name)
        if value.seconds < 0 or value.nanos < 0:
            self.refuse(field, f"{value.seconds + value.nanos / 1e9:g} s is negative; nearest legal value: 0 s")
        return value.seconds + value.nanos / 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A job to make, and how its caller wants to be told about it.

    `inline`: with the bytes of outputs on the stream; `interval`: least seconds between two progress events.
    """

    submission: Submission
    inline: bool
    interval: float


GenerationRequest = (
    generation_pb2.GenerateImageRequest
    | generation_pb2.EditImageRequest
    | generation_pb2.GenerateVideoRequest
    | generation_pb2.GenerateAudioRequest
)


def read_image(request: generation_pb2.GenerateImageRequest, *, streaming: bool) -> Asked:
    """What a GenerateImageRequest asks for, see `read`."""
    return read(request, Task.TEXT_TO_IMAGE, streaming=streaming)


def read(request: GenerationRequest, task: Task, *, streaming: bool) -> Asked:
    """What a request asks for, without its media. `streaming`: its call stays open and watches the job.

    Raises InvalidArgument: FIELD_NOT_SUPPORTED for fields that this version does not serve, else for bad values.
    """
    served, own = _KINDS[type(request)]
    refuse_unserved(request, served)
    reader = Reader()
    draft = dataclasses.replace(_draft(request, task, reader), **own(request, task, reader))
    fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
    asked = _with_options(draft, fingerprint, request.options, reader, streaming=streaming)
    reader.check()
    return asked


def read_inline(field: str, value: int, reader: Reader, *, default: bool) -> bool:
    """Whether the bytes of outputs are to follow on the stream."""
    asked = reader.choice(field, options_pb2.ArtifactDelivery, value, INLINE)
    return default if asked is None else asked


def _given(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _draft(request: GenerationRequest, task: Task, reader: Reader) -> Draft:
    """The fields that all four requests have."""
    sampling, guidance = request.sampling, request.sampling.guidance
    seed = _given(sampling, "seed")
    if seed is not None and sampling.seeds:
        reader.refuse("sampling.seed, sampling.seeds", "both are set; give one of them")
    return Draft(
        model=reader.required("model", request.model),
        prompt=request.prompt,
        task=task,
        negative_prompt=_given(request, "negative_prompt"),
        steps=_given(sampling, "steps"),
        guidance=GuidanceDraft(
            scale=_given(guidance, "scale"),
            true_cfg_scale=_given(guidance, "true_cfg_scale"),
            norm=reader.choice("sampling.guidance.norm", sampling_pb2.GuidanceNorm, guidance.norm, NORMS),
            rescale=_given(guidance, "rescale"),
            interval_start=_given(guidance, "interval_start"),
            interval_end=_given(guidance, "interval_end"),
            scale_low_noise=_given(guidance, "scale_low_noise"),
            boundary_ratio=_given(guidance, "boundary_ratio"),
        ),
        seeds=tuple(sampling.seeds) if seed is None else (seed,),
        num_outputs=_given(sampling, "num_outputs"),
        scheduler=sampling.scheduler,
        loras=tuple(_lora(reference) for reference in sampling.loras),
        cache=_cache(sampling.cache) if sampling.HasField("cache") else None,
        extra={name: _plain(value) for name, value in json_format.MessageToDict(sampling.extra).items()},
    )


def _lora(reference: sampling_pb2.LoraRef) -> Lora:
    scale = _given(reference, "scale")
    return Lora(id=reference.lora_id, scale=1.0 if scale is None else scale, target=reference.target)


def _cache(options: sampling_pb2.CacheOptions) -> CacheDraft | None:
    """None where nothing is chosen."""
    match options.WhichOneof("kind"):
        case "off":
            return CacheDraft(off=True)
        case "tea_cache":
            asked = options.tea_cache
            return CacheDraft(threshold=_given(asked, "rel_l1_thresh"), coefficients=tuple(asked.coefficients))
    return None


def _plain(value: Any) -> Any:
    """A value of a Struct, which has no integers: a whole number is one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _image(request: generation_pb2.GenerateImageRequest, task: Task, reader: Reader) -> dict[str, Any]:
    encoding = reader.choice("output_format", media_pb2.ImageFormat, request.output_format, IMAGE_FORMATS)
    return _picture(request, reader) | {"output_format": encoding}


def _edit(request: generation_pb2.EditImageRequest, task: Task, reader: Reader) -> dict[str, Any]:
    encoding = reader.choice("output_format", media_pb2.ImageFormat, request.output_format, IMAGE_FORMATS)
    own = {name: _given(request, name) for name in ("strength", "layers")}
    return _picture(request, reader) | {"output_format": encoding} | own


def _video(request: generation_pb2.GenerateVideoRequest, task: Task, reader: Reader) -> dict[str, Any]:
    if request.HasField("with_audio") and not (request.with_audio and task is Task.TEXT_TO_AUDIO_VIDEO):
        reader.refuse("with_audio", f"{request.with_audio} cannot be had with {task}; leave it unset, the task decides")
    return _picture(request, reader) | {
        "output_format": reader.choice("output_format", media_pb2.VideoFormat, request.output_format, VIDEO_FORMATS),
        "strength": _given(request, "strength"),
        "num_frames": _given(request, "num_frames"),
        "duration": reader.seconds("duration", request),
        "fps": _given(request, "fps"),
        "output_fps": _given(request, "output_fps"),
    }


def _audio(request: generation_pb2.GenerateAudioRequest, task: Task, reader: Reader) -> dict[str, Any]:
    start, end = reader.seconds("start", request), reader.seconds("end", request)
    duration = reader.seconds("duration", request)
    if end is not None:
        if duration is not None:
            reader.refuse("end, duration", "both are set; give one of them")
        duration = end - (start or 0.0)
        if duration <= 0:
            reader.refuse("start, end", f"the end at {end:g} s is not after the start at {start or 0.0:g} s")
    return {
        "text": request.text,
        "start": start,
        "duration": duration,
        "strength": _given(request, "strength"),
        "sample_rate": _given(request, "sample_rate_hz"),
        "output_format": reader.choice("output_format", media_pb2.AudioFormat, request.output_format, AUDIO_FORMATS),
    }


_KINDS: Mapping[type, tuple[Set[str], Callable[[Any, Task, Reader], dict[str, Any]]]] = {
    generation_pb2.GenerateImageRequest: (GENERATE_IMAGE, _image),
    generation_pb2.EditImageRequest: (EDIT_IMAGE, _edit),
    generation_pb2.GenerateVideoRequest: (GENERATE_VIDEO, _video),
    generation_pb2.GenerateAudioRequest: (GENERATE_AUDIO, _audio),
}
"""For each request, the fields that are served, and how those are read that not all requests have."""


def _picture(request: Any, reader: Reader) -> dict[str, Any]:
    """What all have that make something to look at."""
    return {
        "width": _given(request, "width"),
        "height": _given(request, "height"),
        "preview": _preview(request.options.preview, reader),
    }


def _preview(options: options_pb2.PreviewOptions, reader: Reader) -> Preview | None:
    """The previews that are asked for; None where there are to be none."""
    wanted = reader.choice("options.preview.method", options_pb2.PreviewMethod, options.method, PREVIEWS)
    picture = reader.choice("options.preview.format", media_pb2.ImageFormat, options.format, PREVIEW_FORMATS)
    given = {"every_steps": _given(options, "every_steps"), "max_edge": _given(options, "max_edge_px")}
    given = {name: value for name, value in given.items() if value is not None}
    if not wanted:
        if given or options.format:
            reader.refuse("options.preview.method", "makes no previews; PREVIEW_METHOD_LATENT_RGB makes some")
        return None
    return Preview(format=picture or ImageFormat.WEBP, **given)


def _with_options(
    draft: Draft, fingerprint: bytes, options: options_pb2.JobOptions, reader: Reader, *, streaming: bool
) -> Asked:
    cancels = reader.choice("options.on_disconnect", options_pb2.DisconnectPolicy, options.on_disconnect, CANCELS)
    if cancels is None:
        cancels = streaming
    grace = reader.seconds("options.disconnect_grace", options)
    if grace is not None and not cancels:
        reader.refuse("options.disconnect_grace", "has no effect unless on_disconnect is DISCONNECT_POLICY_CANCEL")
    interval = reader.seconds("options.min_progress_interval", options)
    inline = read_inline("options.delivery", options.delivery, reader, default=streaming)
    if not streaming:
        _refuse_stream_options(reader, grace=grace, interval=interval, inline=inline)
    if len(options.labels) > MAX_LABELS:
        reader.refuse("options.labels", f"has {len(options.labels)} entries, the most is {MAX_LABELS}")
    for text in (text for pair in options.labels.items() for text in pair):
        reader.text("options.labels", text, MAX_ID_CHARS)
    submission = Submission(
        draft=draft,
        labels=dict(options.labels),
        request_id=reader.text("options.request_id", options.request_id, MAX_ID_CHARS),
        fingerprint=fingerprint,
        client_job_id=reader.text("options.client_job_id", options.client_job_id, MAX_ID_CHARS),
        priority=reader.number("options.priority", _given(options, "priority") or 0, -MAX_PRIORITY, MAX_PRIORITY),
        queue_timeout=reader.seconds("options.queue_timeout", options),
        run_timeout=reader.seconds("options.run_timeout", options),
        deadline=_deadline(options, reader),
        retention=_retention(options, reader),
        cancel_on_disconnect=cancels,
        disconnect_grace=grace,
    )
    return Asked(submission, inline, interval or 0.0)


def _deadline(options: options_pb2.JobOptions, reader: Reader) -> float | None:
    if not options.HasField("deadline"):
        return None
    deadline = options.deadline.seconds + options.deadline.nanos / 1e9
    if deadline <= time.time():
        reader.refuse("options.deadline", f"{options.deadline.ToJsonString()} is in the past")
    return deadline


def _retention(options: options_pb2.JobOptions, reader: Reader) -> float | None:
    seconds = reader.seconds("options.retention", options)
    if seconds is not None and seconds > MAX_RETENTION:
        reader.refuse("options.retention", f"{seconds:g} s is too long; nearest legal value: {MAX_RETENTION:g} s")
    return seconds


def _refuse_stream_options(reader: Reader, *, grace: float | None, interval: float | None, inline: bool) -> None:
    """CreateJob has no stream of its own: what shapes one would have no effect there."""
    if inline:
        reader.refuse("options.delivery", "CreateJob sends no bytes; set `delivery` on WatchJob, or use Generate*")
    if interval is not None:
        reader.refuse("options.min_progress_interval", "CreateJob sends no events; set it on WatchJob")
    if grace == 0:
        reader.refuse("options.disconnect_grace", "0 would cancel the job of CreateJob before anybody can watch it")
