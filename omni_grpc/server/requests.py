"""Converts a request message to what the engine takes. Unset fields stay None; zero and "" are ordinary values.

The media that a request brings along are read by `media.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping

from omni_grpc.engine import Submission
from omni_grpc.resolve.draft import make_draft
from omni_grpc.server.fields import Reader, given, members
from omni_grpc.server.served import refuse_unserved
from omni_grpc.types.media import ImageFormat, Preview
from omni_grpc.types.request import Draft, Task
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO, served_paths
from omni_grpc.types.step_cache import CacheDraft
from omni_grpc.v1 import event_pb2, generation_pb2, media_pb2, options_pb2, sampling_pb2

MAX_ID_CHARS = 128
MAX_LABELS = 64
MAX_PRIORITY = 100
MAX_RETENTION = 24 * 3600.0
"""Longest time, in seconds, that a request may have its job kept."""

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
    number: kind
    for number, kind in members(ImageFormat, media_pb2.ImageFormat).items()
    if kind is not ImageFormat.RAW_RGB8
}
TASKS: Mapping[int, Task | None] = members(Task, sampling_pb2.Task)
NAMED_TASKS: Mapping[int, Task] = {number: task for number, task in TASKS.items() if task is not None}
JOB_STATES: Mapping[int, str] = {
    number: name.removeprefix("JOB_STATE_")
    for name, number in event_pb2.JobState.items()
    if number != event_pb2.JOB_STATE_UNSPECIFIED
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A job to create, and how its caller wants to be told about it.

    `inline`: send the bytes of outputs on the stream; `interval`: shortest time in seconds between progress events.
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


KINDS: Mapping[type, str] = {
    generation_pb2.GenerateImageRequest: IMAGE,
    generation_pb2.EditImageRequest: EDIT,
    generation_pb2.GenerateVideoRequest: VIDEO,
    generation_pb2.GenerateAudioRequest: AUDIO,
}
"""The kind of generation that each request asks for."""


def read(request: GenerationRequest, task: Task, *, streaming: bool) -> Asked:
    """What a request asks for, without its media. `streaming`: its call stays open and watches the job.

    Raises InvalidArgument: FIELD_NOT_SUPPORTED for fields that this version does not serve, else for bad values.
    """
    kind = KINDS[type(request)]
    refuse_unserved(request, served_paths(kind))
    reader = Reader()
    asked = reader.options(request, kind)
    asked["preview"] = _preview(request.options.preview, reader)
    asked["cache"] = _cache(request.sampling.cache)
    if isinstance(request, generation_pb2.GenerateVideoRequest):
        _check_sound(request, task, reader)
    draft = make_draft(kind, request.model, request.prompt, task, asked, reader.refuse)
    fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
    job = _with_options(draft, fingerprint, request.options, reader, streaming=streaming)
    reader.check()
    return job


def read_inline(field: str, value: int, reader: Reader, *, default: bool) -> bool:
    """Whether the bytes of outputs are sent on the stream."""
    asked = reader.choice(field, options_pb2.ArtifactDelivery, value, INLINE)
    return default if asked is None else asked


def _cache(options: sampling_pb2.CacheOptions) -> CacheDraft | None:
    """None where nothing is chosen."""
    match options.WhichOneof("kind"):
        case "off":
            return CacheDraft(off=True)
        case "tea_cache":
            asked = options.tea_cache
            return CacheDraft(rel_l1_thresh=given(asked, "rel_l1_thresh"), coefficients=tuple(asked.coefficients))
    return None


def _check_sound(request: generation_pb2.GenerateVideoRequest, task: Task, reader: Reader) -> None:
    if request.HasField("with_audio") and not (request.with_audio and task is Task.TEXT_TO_AUDIO_VIDEO):
        reader.refuse("with_audio", f"{request.with_audio} does not go with {task}; leave it unset, the task decides")


def _preview(options: options_pb2.PreviewOptions, reader: Reader) -> Preview | None:
    """The previews that are asked for; None for no previews."""
    wanted = reader.choice("options.preview.method", options_pb2.PreviewMethod, options.method, PREVIEWS)
    picture = reader.choice("options.preview.format", media_pb2.ImageFormat, options.format, PREVIEW_FORMATS)
    asked = {"every_steps": given(options, "every_steps"), "max_edge_px": given(options, "max_edge_px")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if not wanted:
        if asked or options.format:
            reader.refuse("options.preview.method", "does not produce previews; use PREVIEW_METHOD_LATENT_RGB")
        return None
    return Preview(format=picture or ImageFormat.WEBP, **asked)


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
        reader.refuse("options.labels", f"has {len(options.labels)} entries; the maximum is {MAX_LABELS}")
    for text in (text for pair in options.labels.items() for text in pair):
        reader.text("options.labels", text, MAX_ID_CHARS)
    submission = Submission(
        draft=draft,
        labels=dict(options.labels),
        request_id=reader.text("options.request_id", options.request_id, MAX_ID_CHARS),
        fingerprint=fingerprint,
        client_job_id=reader.text("options.client_job_id", options.client_job_id, MAX_ID_CHARS),
        priority=reader.number("options.priority", given(options, "priority") or 0, -MAX_PRIORITY, MAX_PRIORITY),
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
        reader.refuse("options.retention", f"{seconds:g} s is too long; nearest valid value: {MAX_RETENTION:g} s")
    return seconds


def _refuse_stream_options(reader: Reader, *, grace: float | None, interval: float | None, inline: bool) -> None:
    """Refuses options that shape a stream: CreateJob has none, so they would have no effect."""
    if inline:
        reader.refuse(
            "options.delivery", "CreateJob does not stream bytes; set `delivery` on WatchJob, or use Generate*"
        )
    if interval is not None:
        reader.refuse("options.min_progress_interval", "CreateJob does not stream events; set it on WatchJob")
    if grace == 0:
        reader.refuse("options.disconnect_grace", "0 would cancel the job of CreateJob before anyone can watch it")
