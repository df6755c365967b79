"""Requests, built from what the caller wrote. Pure functions, shared by the sync and the asyncio client."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from omni_grpc import request as vocabulary
from omni_grpc.errors import FailedPrecondition, InvalidArgument, Violation
from omni_grpc.v1 import event_pb2, media_pb2, options_pb2, sampling_pb2
from omni_grpc.v1.event_pb2 import JobState
from omni_grpc.v1.generation_pb2 import GenerateImageRequest
from omni_grpc.v1.job_pb2 import ListJobsRequest
from omni_grpc.v1.model_pb2 import Model

PAGE = 100
"""Jobs that are asked for at once."""


class ImageOptions(TypedDict, total=False):
    """What one generation may ask for besides its prompt. None is the same as not given: the model's default."""

    negative_prompt: str | None
    """What to steer away from. The empty string counts: it turns classifier-free guidance on."""
    width: int | None
    """Pixels."""
    height: int | None
    """Pixels."""
    steps: int | None
    guidance_scale: float | None
    """Embedded guidance of distilled models."""
    true_cfg_scale: float | None
    """Classifier-free guidance; active above 1 and with a negative_prompt."""
    guidance_norm: vocabulary.GuidanceNorm | str | None
    guidance_rescale: float | None
    """Share of the guided prediction that gets the standard deviation of the conditional one, from 0 to 1."""
    guidance_start: float | None
    """Guidance is on from this fraction of the steps..."""
    guidance_end: float | None
    """...until before this one."""
    seed: int | None
    """Seed of output 0; output i uses seed + i."""
    seeds: Sequence[int] | None
    """One seed for each output. Give this or `seed`."""
    num_outputs: int | None
    output_format: vocabulary.ImageFormat | str | None
    request_id: str | None
    """Idempotency key; a UUID4 where none is given."""
    labels: Mapping[str, str] | None
    """For list_jobs."""
    priority: int | None
    """Higher runs first."""
    queue_timeout: float | None
    """Seconds after which a job that has not started fails. A limit of the job, whoever waits for it."""
    run_timeout: float | None
    """Seconds from its start after which a job fails."""
    retention: float | None
    """Seconds that the server keeps the job and its outputs after its end."""
    preview_every: int | None
    """Small pictures on every n-th step event (`step_progress.previews`); not given: none."""
    preview_max_edge: int | None
    """Longer side of a preview in pixels at most."""


def image_request(model: str, prompt: str, options: ImageOptions) -> GenerateImageRequest:
    """Raises TypeError for an unknown option, InvalidArgument for values that cannot be sent, naming each field."""
    for name in options.keys() - ImageOptions.__annotations__.keys():
        close = difflib.get_close_matches(name, ImageOptions.__annotations__, n=1)
        raise TypeError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    asked: dict[str, Any] = {"model": model, "prompt": prompt, "request_id": str(uuid.uuid4())}
    asked |= {name: value for name, value in options.items() if value is not None}
    request = GenerateImageRequest()
    violations = []
    for name, value in asked.items():
        field = _FIELDS[name]
        try:
            field.write(request, value)
        except (TypeError, ValueError, OverflowError):
            violations.append(Violation(field.path, f"is {value!r}, expected {field.expected}"))
    if violations:
        raise InvalidArgument("; ".join(f"{v.field} {v.description}" for v in violations), violations=tuple(violations))
    return request


def only_model(models: Sequence[Model]) -> str:
    """The model that a request means when it names none. Raises where there is no model, or a choice."""
    if len(models) == 1:
        return models[0].name
    if not models:
        raise FailedPrecondition("the server has no model", reason="NO_MODEL")
    names = ", ".join(model.name for model in models)
    rule = f"is not set and this server has several; choose one of {names}"
    raise InvalidArgument(f"model {rule}", reason="MODEL_REQUIRED", violations=(Violation("model", rule),))


def list_jobs_request(states: Collection[str], labels: Mapping[str, str], limit: int) -> ListJobsRequest:
    """`states` are names without their prefix, in any case. Raises InvalidArgument for one that does not exist."""
    if limit < 1:
        raise InvalidArgument(f"limit is {limit}, expected 1 or more", violations=(Violation("limit", "is below 1"),))
    known = [name.removeprefix("JOB_STATE_") for name in JobState.keys()[1:]]
    for state in states:
        if state.upper() not in known:
            rule = f"has {state!r}, expected some of {', '.join(known)}"
            raise InvalidArgument(f"states {rule}", violations=(Violation("states", rule),))
    names = [f"JOB_STATE_{state.upper()}" for state in states]
    return ListJobsRequest(page_size=min(limit, PAGE), label_selector=labels, states=names)


def state_name(state: event_pb2.JobState) -> str:
    """The name of a state without its prefix; a number where this client is older than the state."""
    return JobState.Name(state).removeprefix("JOB_STATE_") if state in JobState.values() else str(int(state))


Put = Callable[[Any, str, Any], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """Where an option goes in the request, what it may be, and how it is put there."""

    path: str
    expected: str
    put: Put = setattr

    def write(self, request: GenerateImageRequest, value: Any) -> None:
        *parents, leaf = self.path.split(".")
        message: Any = request
        for parent in parents:
            message = getattr(message, parent)
        self.put(message, leaf, value)


def _extend(message: Any, name: str, value: Iterable[int]) -> None:
    getattr(message, name).extend(value)


def _update(message: Any, name: str, value: Mapping[str, str]) -> None:
    getattr(message, name).update(value)


def _put_format(message: Any, name: str, value: str) -> None:
    choice = vocabulary.ImageFormat(str(value).upper())
    setattr(message, name, media_pb2.ImageFormat.Value(f"IMAGE_FORMAT_{choice}"))


def _put_norm(message: Any, name: str, value: str) -> None:
    choice = vocabulary.GuidanceNorm(str(value).upper())
    setattr(message, name, sampling_pb2.GuidanceNorm.Value(f"GUIDANCE_NORM_{choice}"))


def _put_seconds(message: Any, name: str, value: float) -> None:
    getattr(message, name).FromTimedelta(datetime.timedelta(seconds=value))


def _put_preview(message: Any, name: str, value: int) -> None:
    setattr(message, name, value)
    message.method = options_pb2.PREVIEW_METHOD_LATENT_RGB


_SIZE = "a whole number from 0 to 4294967295"
_SEED = "a whole number from 0 to 9007199254740991"

_FIELDS: Mapping[str, _Field] = {
    "model": _Field("model", "a model's name"),
    "prompt": _Field("prompt", "text"),
    "negative_prompt": _Field("negative_prompt", "text"),
    "width": _Field("width", _SIZE),
    "height": _Field("height", _SIZE),
    "steps": _Field("sampling.steps", _SIZE),
    "guidance_scale": _Field("sampling.guidance.scale", "a number"),
    "true_cfg_scale": _Field("sampling.guidance.true_cfg_scale", "a number"),
    "guidance_norm": _Field("sampling.guidance.norm", f"one of {', '.join(vocabulary.GuidanceNorm)}", _put_norm),
    "guidance_rescale": _Field("sampling.guidance.rescale", "a number"),
    "guidance_start": _Field("sampling.guidance.interval_start", "a number"),
    "guidance_end": _Field("sampling.guidance.interval_end", "a number"),
    "seed": _Field("sampling.seed", _SEED),
    "seeds": _Field("sampling.seeds", f"a list, each entry {_SEED}", _extend),
    "num_outputs": _Field("sampling.num_outputs", _SIZE),
    "output_format": _Field("output_format", f"one of {', '.join(vocabulary.ImageFormat)}", _put_format),
    "request_id": _Field("options.request_id", "text"),
    "labels": _Field("options.labels", "a mapping of text to text", _update),
    "priority": _Field("options.priority", "a whole number"),
    "queue_timeout": _Field("options.queue_timeout", "a number of seconds", _put_seconds),
    "run_timeout": _Field("options.run_timeout", "a number of seconds", _put_seconds),
    "retention": _Field("options.retention", "a number of seconds", _put_seconds),
    "preview_every": _Field("options.preview.every_steps", _SIZE, _put_preview),
    "preview_max_edge": _Field("options.preview.max_edge_px", _SIZE),
}
