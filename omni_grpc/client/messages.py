"""Requests, built from what the caller wrote. Pure functions, shared by the sync and the asyncio client."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from omni_grpc.client.media import MediaSource, media_input, media_inputs
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument, Violation
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.request import GuidanceNorm, Task
from omni_grpc.v1 import event_pb2, media_pb2, options_pb2, sampling_pb2
from omni_grpc.v1.event_pb2 import JobState
from omni_grpc.v1.generation_pb2 import (
    EditImageRequest,
    GenerateAudioRequest,
    GenerateImageRequest,
    GenerateVideoRequest,
)
from omni_grpc.v1.job_pb2 import ListJobsRequest
from omni_grpc.v1.model_pb2 import Model

PAGE = 100
"""Jobs that are asked for at once."""


class Options(TypedDict, total=False):
    """What any generation may ask for besides its prompt. None is the same as not given: the model's default."""

    negative_prompt: str | None
    """What to steer away from. The empty string counts: it turns classifier-free guidance on."""
    steps: int | None
    guidance_scale: float | None
    """Embedded guidance of distilled models."""
    true_cfg_scale: float | None
    """Classifier-free guidance; active above 1 and with a negative_prompt."""
    guidance_norm: GuidanceNorm | str | None
    guidance_rescale: float | None
    """Share of the guided prediction that gets the standard deviation of the conditional one, from 0 to 1."""
    guidance_start: float | None
    """Guidance is on from this fraction of the steps..."""
    guidance_end: float | None
    """...until before this one."""
    true_cfg_scale_2: float | None
    """Models with two experts: `true_cfg_scale` for the expert for low noise. Not given: the same."""
    boundary_ratio: float | None
    """Models with two experts: the fraction of the training timesteps at which that one takes over, from 0 to 1."""
    seed: int | None
    """Seed of output 0; output i uses seed + i."""
    seeds: Sequence[int] | None
    """One seed for each output. Give this or `seed`."""
    num_outputs: int | None
    scheduler: str | None
    """One of the model's schedulers, by name; not given: the checkpoint's own."""
    loras: Mapping[str, float] | None
    """Adapters of the server, by name, each with its scale."""
    extra: Mapping[str, Any] | None
    """Parameters of one model, by name."""
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


class PictureOptions(Options, total=False):
    """What is made to be looked at."""

    width: int | None
    """Pixels."""
    height: int | None
    """Pixels."""
    preview_every: int | None
    """Small pictures on every n-th step event (`step_progress.previews`); not given: none."""
    preview_max_edge: int | None
    """Longer side of a preview in pixels at most."""


class ImageOptions(PictureOptions, total=False):
    """What an image may ask for besides its prompt."""

    output_format: ImageFormat | str | None


class EditOptions(ImageOptions, total=False):
    """What an edit may ask for besides its prompt and its images. The task follows from the inputs."""

    mask: MediaSource | None
    """White is made anew, black is kept; as large as the first image."""
    strength: float | None
    """How much of the image is replaced by noise, from 0 to 1."""
    layers: int | None
    """Takes the image apart into so many, each with alpha."""
    task: Task | str | None
    """Overrules the task that the inputs stand for."""


class VideoOptions(PictureOptions, total=False):
    """What a video may ask for besides its prompt. The task follows from the inputs."""

    first_frame: MediaSource | None
    last_frame: MediaSource | None
    source_video: MediaSource | None
    reference_images: Sequence[MediaSource] | None
    control_video: MediaSource | None
    mask_video: MediaSource | None
    audio: MediaSource | None
    """Sound that drives the video."""
    strength: float | None
    """How much of source_video is replaced by noise, from 0 to 1."""
    num_frames: int | None
    """Give this or `duration`."""
    duration: float | None
    """Seconds; the video gets the number of frames that is nearest and legal."""
    fps: float | None
    """Frames per second that the model generates for."""
    output_fps: float | None
    """Frames per second of the file."""
    task: Task | str | None
    """Overrules the task that the inputs stand for."""
    output_format: VideoFormat | str | None


class AudioOptions(Options, total=False):
    """What a sound may ask for besides its prompt."""

    text: str | None
    """Words to be sung or spoken."""
    reference: MediaSource | None
    """A sound to start from."""
    strength: float | None
    """How much of `reference` is replaced by noise, from 0 to 1."""
    start: float | None
    """Seconds: where in the whole piece the clip begins."""
    end: float | None
    """Seconds: where it ends. Give this or `duration`."""
    duration: float | None
    """Seconds."""
    sample_rate: int | None
    """Samples per second of the file."""
    output_format: AudioFormat | str | None


def image_request(model: str, prompt: str, options: ImageOptions) -> GenerateImageRequest:
    """Raises TypeError for an unknown option, InvalidArgument for values that cannot be sent, naming each field."""
    return _request(GenerateImageRequest(), _FIELDS, model, prompt, options)


def edit_request(model: str, prompt: str, images: Sequence[MediaSource], options: EditOptions) -> EditImageRequest:
    """As `image_request`. Raises OSError for a file that cannot be read."""
    return _request(EditImageRequest(), _EDIT_FIELDS, model, prompt, {"images": images, **options})


def video_request(model: str, prompt: str, options: VideoOptions) -> GenerateVideoRequest:
    """As `edit_request`."""
    if options.get("num_frames") is not None and options.get("duration") is not None:
        rule = "are both set; give one of them"
        raise InvalidArgument(f"num_frames, duration {rule}", violations=(Violation("num_frames, duration", rule),))
    return _request(GenerateVideoRequest(), _VIDEO_FIELDS, model, prompt, options)


def audio_request(model: str, prompt: str, options: AudioOptions) -> GenerateAudioRequest:
    """As `edit_request`."""
    return _request(GenerateAudioRequest(), _AUDIO_FIELDS, model, prompt, options)


R = TypeVar("R", GenerateImageRequest, EditImageRequest, GenerateVideoRequest, GenerateAudioRequest)


def _request(request: R, fields: Mapping[str, _Field], model: str, prompt: str, options: Mapping[str, Any]) -> R:
    for name in options.keys() - (fields.keys() - {"model", "prompt"}):
        close = difflib.get_close_matches(name, fields, n=1)
        raise TypeError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    asked: dict[str, Any] = {"model": model, "prompt": prompt, "request_id": str(uuid.uuid4())}
    asked |= {name: value for name, value in options.items() if value is not None}
    violations = []
    for name, value in asked.items():
        field = fields[name]
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

    def write(self, request: Message, value: Any) -> None:
        *parents, leaf = self.path.split(".")
        message: Any = request
        for parent in parents:
            message = getattr(message, parent)
        self.put(message, leaf, value)


def _extend(message: Any, name: str, value: Iterable[int]) -> None:
    getattr(message, name).extend(value)


def _update(message: Any, name: str, value: Mapping[str, str]) -> None:
    getattr(message, name).update(value)


def _put_member(kind: type[enum.StrEnum], wire: Any, prefix: str) -> Put:
    def put(message: Any, name: str, value: str) -> None:
        setattr(message, name, wire.Value(f"{prefix}_{kind(str(value).upper())}"))

    return put


def _put_media(message: Any, name: str, value: Any) -> None:
    getattr(message, name).CopyFrom(media_input(value))


def _put_several(message: Any, name: str, value: Any) -> None:
    getattr(message, name).extend(media_inputs(value))


def _put_struct(message: Any, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    getattr(message, name).update(value)


def _put_loras(message: Any, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    for lora_id, scale in value.items():
        getattr(message, name).add(lora_id=lora_id, scale=scale)


def _put_seconds(message: Any, name: str, value: float) -> None:
    getattr(message, name).FromTimedelta(datetime.timedelta(seconds=value))


def _put_preview(message: Any, name: str, value: int) -> None:
    setattr(message, name, value)
    message.method = options_pb2.PREVIEW_METHOD_LATENT_RGB


_SIZE = "a whole number from 0 to 4294967295"
_SEED = "a whole number from 0 to 9007199254740991"

_SECONDS = "a number of seconds"
_MEDIA = "a path, bytes, a picture, an uploaded asset or an artifact"


def _one_of(path: str, kind: type[enum.StrEnum], wire: Any, prefix: str) -> _Field:
    return _Field(path, f"one of {', '.join(kind)}", _put_member(kind, wire, prefix))


_TASK = _one_of("task", Task, sampling_pb2.Task, "TASK")
_STRENGTH = _Field("strength", "a number from 0 to 1")

_COMMON: Mapping[str, _Field] = {
    "model": _Field("model", "a model's name"),
    "prompt": _Field("prompt", "text"),
    "negative_prompt": _Field("negative_prompt", "text"),
    "steps": _Field("sampling.steps", _SIZE),
    "guidance_scale": _Field("sampling.guidance.scale", "a number"),
    "true_cfg_scale": _Field("sampling.guidance.true_cfg_scale", "a number"),
    "guidance_norm": _one_of("sampling.guidance.norm", GuidanceNorm, sampling_pb2.GuidanceNorm, "GUIDANCE_NORM"),
    "guidance_rescale": _Field("sampling.guidance.rescale", "a number"),
    "guidance_start": _Field("sampling.guidance.interval_start", "a number"),
    "guidance_end": _Field("sampling.guidance.interval_end", "a number"),
    "true_cfg_scale_2": _Field("sampling.guidance.scale_low_noise", "a number"),
    "boundary_ratio": _Field("sampling.guidance.boundary_ratio", "a number from 0 to 1"),
    "seed": _Field("sampling.seed", _SEED),
    "seeds": _Field("sampling.seeds", f"a list, each entry {_SEED}", _extend),
    "num_outputs": _Field("sampling.num_outputs", _SIZE),
    "scheduler": _Field("sampling.scheduler", "text"),
    "loras": _Field("sampling.loras", "a mapping of adapters to numbers", _put_loras),
    "extra": _Field("sampling.extra", "a mapping of names to JSON values", _put_struct),
    "request_id": _Field("options.request_id", "text"),
    "labels": _Field("options.labels", "a mapping of text to text", _update),
    "priority": _Field("options.priority", "a whole number"),
    "queue_timeout": _Field("options.queue_timeout", _SECONDS, _put_seconds),
    "run_timeout": _Field("options.run_timeout", _SECONDS, _put_seconds),
    "retention": _Field("options.retention", _SECONDS, _put_seconds),
}
_PICTURES: Mapping[str, _Field] = {
    **_COMMON,
    "width": _Field("width", _SIZE),
    "height": _Field("height", _SIZE),
    "preview_every": _Field("options.preview.every_steps", _SIZE, _put_preview),
    "preview_max_edge": _Field("options.preview.max_edge_px", _SIZE),
}
_FIELDS: Mapping[str, _Field] = {
    **_PICTURES,
    "output_format": _one_of("output_format", ImageFormat, media_pb2.ImageFormat, "IMAGE_FORMAT"),
}
_EDIT_FIELDS: Mapping[str, _Field] = {
    **_FIELDS,
    "images": _Field("images", f"a list, each entry {_MEDIA}", _put_several),
    "mask": _Field("mask", _MEDIA, _put_media),
    "strength": _STRENGTH,
    "layers": _Field("layers", _SIZE),
    "task": _TASK,
}
_VIDEO_FIELDS: Mapping[str, _Field] = {
    **_PICTURES,
    **{
        name: _Field(name, _MEDIA, _put_media)
        for name in ("first_frame", "last_frame", "source_video", "control_video", "mask_video", "audio")
    },
    "reference_images": _Field("reference_images", f"a list, each entry {_MEDIA}", _put_several),
    "strength": _STRENGTH,
    "num_frames": _Field("num_frames", _SIZE),
    "duration": _Field("duration", _SECONDS, _put_seconds),
    "fps": _Field("fps", "a number"),
    "output_fps": _Field("output_fps", "a number"),
    "task": _TASK,
    "output_format": _one_of("output_format", VideoFormat, media_pb2.VideoFormat, "VIDEO_FORMAT"),
}
_AUDIO_FIELDS: Mapping[str, _Field] = {
    **_COMMON,
    "text": _Field("text", "text"),
    "reference": _Field("reference", _MEDIA, _put_media),
    "strength": _STRENGTH,
    "start": _Field("start", _SECONDS, _put_seconds),
    "end": _Field("end", _SECONDS, _put_seconds),
    "duration": _Field("duration", _SECONDS, _put_seconds),
    "sample_rate": _Field("sample_rate_hz", _SIZE),
    "output_format": _one_of("output_format", AudioFormat, media_pb2.AudioFormat, "AUDIO_FORMAT"),
}
