"""Converts a request message to what the gate takes. Unset fields stay None; zero and "" are ordinary values."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from omni_grpc.gate import Ask, AskedWebhook, Delivery, JobOptions, Medium
from omni_grpc.resolve.draft import make_draft
from omni_grpc.server.fields import Reader, given, members
from omni_grpc.server.served import refuse_unserved
from omni_grpc.types.media import ImageFormat, Preview
from omni_grpc.types.request import RestartPolicy, Task
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO, served_paths
from omni_grpc.types.requested import Traits, traits
from omni_grpc.types.step_cache import CacheDraft, CacheQuality
from omni_grpc.types.written import written
from omni_grpc.v1 import event_pb2, generation_pb2, media_pb2, options_pb2, sampling_pb2
from omni_grpc.wire.cache_choice import read_cache

NAMES: Mapping[str, str] = {"reference": "audio"}
"""Fields of requests whose name in Inputs is another."""

CANCELS: Mapping[int, bool | None] = {
    options_pb2.DISCONNECT_POLICY_UNSPECIFIED: None,
    options_pb2.DISCONNECT_POLICY_CANCEL: True,
    options_pb2.DISCONNECT_POLICY_KEEP: False,
}
DELIVERIES: Mapping[int, Delivery | None] = members(Delivery, options_pb2.ArtifactDelivery)
RESTARTS: Mapping[int, RestartPolicy | None] = members(RestartPolicy, options_pb2.RestartPolicy)
QUALITIES: Mapping[int, CacheQuality | None] = members(CacheQuality, sampling_pb2.CacheQuality)
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


def read(request: GenerationRequest, task: Task, *, streaming: bool) -> Ask:
    """What a request asks for. `streaming`: its call stays open and watches the job.

    Raises InvalidArgument (FIELD_NOT_SUPPORTED) for fields that this version does not serve. Values that no type of
    ours can hold are among its violations.
    """
    kind = KINDS[type(request)]
    refuse_unserved(request, served_paths(kind))
    reader = Reader()
    media = tuple(_media(request))
    asked = reader.options(request, kind)
    asked["preview"] = _preview(request.options.preview, reader)
    asked["cache"] = _cache(request.sampling.cache, reader)
    if isinstance(request, generation_pb2.GenerateVideoRequest):
        _check_sound(request, task, reader)
    draft = make_draft(kind, request.model, request.prompt, task, asked, reader.refuse)
    if draft.embed_parameters:
        draft = dataclasses.replace(draft, input_traits=_traits(media))
    return Ask(
        draft=draft,
        options=_job_options(request.options, reader),
        streaming=streaming,
        media=media,
        fingerprint=hashlib.sha256(request.SerializeToString(deterministic=True)).digest(),
        violations=reader.found,
    )


def read_delivery(field: str, value: int, reader: Reader) -> Delivery | None:
    """How outputs reach a watcher; None if that is not said."""
    return reader.choice(field, options_pb2.ArtifactDelivery, value, DELIVERIES)


def _cache(options: sampling_pb2.CacheOptions, reader: Reader) -> CacheDraft | None:
    """None where nothing is chosen."""
    kind = options.WhichOneof("kind")
    quality = reader.choice("sampling.cache.quality", sampling_pb2.CacheQuality, options.quality, QUALITIES)
    if kind is not None and quality is not None:
        reader.refuse(
            "sampling.cache.quality", f"chooses the method itself; leave out {kind}, or leave out the quality"
        )
    return read_cache(options)


def _check_sound(request: generation_pb2.GenerateVideoRequest, task: Task, reader: Reader) -> None:
    if request.HasField("with_audio") and not (request.with_audio and task is Task.TEXT_TO_AUDIO_VIDEO):
        reader.refuse(
            "with_audio", f"{written(request.with_audio)} does not go with {task}; leave it unset, the task decides"
        )


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


def _job_options(options: options_pb2.JobOptions, reader: Reader) -> JobOptions:
    deadline = options.deadline.seconds + options.deadline.nanos / 1e9
    return JobOptions(
        request_id=options.request_id,
        client_job_id=options.client_job_id,
        labels=dict(options.labels),
        priority=options.priority,
        queue_timeout=reader.seconds("options.queue_timeout", options),
        run_timeout=reader.seconds("options.run_timeout", options),
        deadline=deadline if options.HasField("deadline") else None,
        retention=reader.seconds("options.retention", options),
        cancels=reader.choice("options.on_disconnect", options_pb2.DisconnectPolicy, options.on_disconnect, CANCELS),
        disconnect_grace=reader.seconds("options.disconnect_grace", options),
        delivery=read_delivery("options.delivery", options.delivery, reader),
        restart=reader.choice(
            "options.on_server_restart", options_pb2.RestartPolicy, options.on_server_restart, RESTARTS
        ),
        webhook=_webhook(options.webhook) if options.HasField("webhook") else None,
        interval=reader.seconds("options.min_progress_interval", options),
    )


def _webhook(webhook: options_pb2.Webhook) -> AskedWebhook:
    # what is no state keeps its number, and is refused by it
    states = tuple(JOB_STATES.get(value, str(value)) for value in webhook.states)
    return AskedWebhook(url=webhook.url, secret_name=webhook.secret_name, states=states)


def _media(request: GenerationRequest) -> Iterator[Medium]:
    """Every input of a request, with its path there."""
    for field, value in request.ListFields():
        if field.message_type is None or field.message_type.name != "MediaInput":
            continue
        if field.is_repeated:
            for i, entry in enumerate(value):
                yield _medium(f"{field.name}[{i}]", field.name, entry)
        else:
            yield _medium(field.name, field.name, value)


def _traits(media: Sequence[Medium]) -> Traits:
    """What tells the inputs of a request from others, by field."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for one in media:
        told = traits(data=one.data, uri=one.uri, asset_id=one.asset_id)
        found.setdefault(one.path.partition("[")[0], []).append(told)
    return found


def _medium(path: str, name: str, message: media_pb2.MediaInput) -> Medium:
    source = message.WhichOneof("source")
    return Medium(
        path=path,
        name=NAMES.get(name, name),
        data=message.data if source == "data" else None,
        uri=message.uri if source == "uri" else None,
        asset_id=message.asset_id if source == "asset_id" else None,
        mime_type=message.mime_type,
        sha256=message.sha256,
    )
