"""Requests, built from what the caller wrote. Pure functions, shared by the sync and the asyncio client."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from omni_grpc.client.media import MediaSource, media_input, media_inputs
from omni_grpc.client.options import AudioOptions, EditOptions, ImageOptions, VideoOptions
from omni_grpc.client.pictures import NotMedia
from omni_grpc.types.cache_choice import Choice
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument, Violation
from omni_grpc.types.lora import split
from omni_grpc.types.request_options import (
    AUDIO,
    EDIT,
    IMAGE,
    VIDEO,
    RequestOption,
    checked_names,
    exclusive_faults,
    normalized,
    options_of,
)
from omni_grpc.v1 import event_pb2, options_pb2
from omni_grpc.v1.event_pb2 import JobState
from omni_grpc.v1.generation_pb2 import (
    EditImageRequest,
    GenerateAudioRequest,
    GenerateImageRequest,
    GenerateVideoRequest,
)
from omni_grpc.v1.job_pb2 import ListJobsRequest
from omni_grpc.v1.model_pb2 import Model
from omni_grpc.wire.cache_choice import write_cache

PAGE, MAX_PAGE = 100, 1000
"""Jobs that are asked for at once, where a caller waits for the first ones and where for all."""
Moment = datetime.datetime | Timestamp


def image_request(model: str, prompt: str, options: ImageOptions) -> GenerateImageRequest:
    """Raises TypeError for an unknown option, InvalidArgument for values that cannot be sent, naming each field."""
    return _request(GenerateImageRequest(), IMAGE, model, prompt, options)


def edit_request(model: str, prompt: str, images: Sequence[MediaSource], options: EditOptions) -> EditImageRequest:
    """As `image_request`. Raises OSError for a file that cannot be read."""
    return _request(EditImageRequest(), EDIT, model, prompt, {"images": images, **options})


def video_request(model: str, prompt: str, options: VideoOptions) -> GenerateVideoRequest:
    """As `edit_request`."""
    return _request(GenerateVideoRequest(), VIDEO, model, prompt, options)


def audio_request(model: str, prompt: str, options: AudioOptions) -> GenerateAudioRequest:
    """As `edit_request`."""
    return _request(GenerateAudioRequest(), AUDIO, model, prompt, options)


R = TypeVar("R", GenerateImageRequest, EditImageRequest, GenerateVideoRequest, GenerateAudioRequest)


def _request(request: R, kind: str, model: str, prompt: str, options: Mapping[str, Any]) -> R:
    faults: dict[str, str] = {}
    values = {"request_id": str(uuid.uuid4())} | normalized(kind, checked_names(kind, options), faults)
    faults |= exclusive_faults(kind, values)
    for option in options_of(kind):
        if option.name not in values:
            continue
        try:
            _write(request, option, values[option.name])
        except NotMedia as error:
            faults[option.path] = str(error)
        except (TypeError, ValueError, OverflowError):
            faults[option.path] = f"is {values[option.name]!r}, expected {option.type.expected}"
    for name, value in (("model", model), ("prompt", prompt)):
        try:
            setattr(request, name, value)
        except (TypeError, ValueError):
            faults[name] = f"is {value!r}, expected text"
    if faults:
        violations = tuple(Violation(path, fault) for path, fault in faults.items())
        raise InvalidArgument("; ".join(f"{v.field} {v.description}" for v in violations), violations=violations)
    return request


def _write(request: Message, option: RequestOption, value: Any) -> None:
    *parents, leaf = option.path.split(".")
    message: Any = request
    for parent in parents:
        message = getattr(message, parent)
    if option.type.choices is not None:
        wire = message.DESCRIPTOR.fields_by_name[leaf].enum_type
        prefix = wire.values[0].name.removesuffix("UNSPECIFIED")
        setattr(message, leaf, wire.values_by_name[prefix + value].number)
    else:
        put: Callable[[Any, str, Any], None] = _PUT.get(option.type.name, setattr)
        put(message, leaf, value)
    if option.name == "preview_every_steps":
        message.method = options_pb2.PREVIEW_METHOD_LATENT_RGB


def only_model(models: Sequence[Model]) -> str:
    """The model that a request means when it names none. Raises where there is no model, or a choice."""
    if len(models) == 1:
        return models[0].name
    if not models:
        raise FailedPrecondition("the server has no model", reason="NO_MODEL")
    names = ", ".join(model.name for model in models)
    rule = f"is not set, but this server has several; choose one of {names}"
    raise InvalidArgument(f"model {rule}", reason="MODEL_REQUIRED", violations=(Violation("model", rule),))


class JobFilters(TypedDict, total=False):
    """Which jobs: those in one of these `states` ("RUNNING", in any case), that have all of these `labels`, of this
    `model`, of this `tenant` (for callers who see several), created at `created_from` or later, and before
    `created_before`. A time is that of a job as it is, or a datetime with a time zone. Left out: all.
    """

    states: Collection[str]
    labels: Mapping[str, str]
    model: str
    tenant: str
    created_from: Moment | None
    created_before: Moment | None


def list_jobs_request(filters: JobFilters, limit: int = MAX_PAGE, page: int = PAGE) -> ListJobsRequest:
    """Raises InvalidArgument for a filter that cannot be sent, naming it, TypeError for one that does not exist."""
    if limit < 1:
        raise InvalidArgument(f"limit is {limit}, expected 1 or more", violations=(Violation("limit", "is below 1"),))
    if unknown := filters.keys() - JobFilters.__annotations__.keys():
        raise TypeError(f"unknown filter {', '.join(map(repr, sorted(unknown)))}")
    states = filters.get("states", ())
    known = [name.removeprefix("JOB_STATE_") for name in JobState.keys()[1:]]
    for state in states:
        if state.upper() not in known:
            rule = f"has {state!r}, expected some of {', '.join(known)}"
            raise InvalidArgument(f"states {rule}", violations=(Violation("states", rule),))
    request = ListJobsRequest(page_size=min(limit, page), states=[f"JOB_STATE_{state.upper()}" for state in states])
    request.label_selector.update(filters.get("labels", {}))
    request.model = filters.get("model", "")
    request.tenant = filters.get("tenant", "")
    for name in ("created_from", "created_before"):
        if (moment := filters.get(name)) is not None:
            getattr(request, name).CopyFrom(_timestamp(name, moment))
    return request


def _timestamp(name: str, moment: Any) -> Timestamp:
    if isinstance(moment, Timestamp):
        return moment
    if not isinstance(moment, datetime.datetime) or moment.tzinfo is None:
        rule = f"is {moment!r}, expected a datetime with a time zone, or the time of a job"
        raise InvalidArgument(f"{name} {rule}", violations=(Violation(name, rule),))
    result = Timestamp()
    result.FromDatetime(moment)
    return result


def state_name(state: event_pb2.JobState) -> str:
    """The name of a state without its prefix; a number where this client is older than the state."""
    return JobState.Name(state).removeprefix("JOB_STATE_") if state in JobState.values() else str(int(state))


def _extend(message: Any, name: str, value: Iterable[int]) -> None:
    getattr(message, name).extend(value)


def _update(message: Any, name: str, value: Mapping[str, Any]) -> None:
    getattr(message, name).update(value)


def _put_media(message: Any, name: str, value: Any) -> None:
    getattr(message, name).CopyFrom(media_input(value))


def _put_several(message: Any, name: str, value: Any) -> None:
    getattr(message, name).extend(media_inputs(value))


def _put_loras(message: Any, name: str, value: Mapping[str, float]) -> None:
    for asked, scale in value.items():
        lora_id, target = split(asked)
        getattr(message, name).add(lora_id=lora_id, target=target, scale=scale)


def _put_cache(message: Any, name: str, value: Choice) -> None:
    write_cache(getattr(message, name), value)


def _put_seconds(message: Any, name: str, value: float) -> None:
    getattr(message, name).FromTimedelta(datetime.timedelta(seconds=value))


_PUT: Mapping[str, Callable[[Any, str, Any], None]] = {
    "SEEDS": _extend,
    "NUMBERS": _extend,
    "LABELS": _update,
    "EXTRA": _update,
    "MEDIA": _put_media,
    "MEDIA_LIST": _put_several,
    "LORAS": _put_loras,
    "CACHE": _put_cache,
    "SECONDS": _put_seconds,
}
"""How values are put into a message that are not just set, by the name of their type."""
