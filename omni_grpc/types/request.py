"""What a user asks for: a Draft as it arrived, and the Request that it is completed to. Plain frozen data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from omni_grpc.types.lora import Lora
from omni_grpc.types.media import Inputs, Modality, OutputFormat, Preview
from omni_grpc.types.requested import Embedding, Traits
from omni_grpc.types.step_cache import CacheDraft, RequestCache

MAX_SEED = 2**53 - 1
"""Largest seed: the largest integer that JSON, JavaScript and protobuf's Struct carry without loss."""


class Task(enum.StrEnum):
    """What a model can be asked to do. The names are those of the API's `Task` enum without its prefix."""

    TEXT_TO_IMAGE = "TEXT_TO_IMAGE"
    IMAGE_TO_IMAGE = "IMAGE_TO_IMAGE"
    IMAGE_EDIT = "IMAGE_EDIT"
    INPAINT = "INPAINT"
    LAYERED = "LAYERED"
    TEXT_TO_VIDEO = "TEXT_TO_VIDEO"
    IMAGE_TO_VIDEO = "IMAGE_TO_VIDEO"
    VIDEO_TO_VIDEO = "VIDEO_TO_VIDEO"
    VIDEO_EDIT = "VIDEO_EDIT"
    AUDIO_TO_VIDEO = "AUDIO_TO_VIDEO"
    TEXT_TO_AUDIO = "TEXT_TO_AUDIO"
    TEXT_TO_AUDIO_VIDEO = "TEXT_TO_AUDIO_VIDEO"

    @property
    def modality(self) -> Modality:
        seen = Modality.VIDEO if "VIDEO" in self.value else Modality.IMAGE
        return Modality.AUDIO if self is Task.TEXT_TO_AUDIO else seen


class RestartPolicy(enum.StrEnum):
    """What becomes of a job that was running when its server was lost. The names are those of the API's enum without
    its prefix.
    """

    FAIL = "FAIL"
    REQUEUE = "REQUEUE"


class GuidanceNorm(enum.StrEnum):
    """What happens to the length of the guided prediction, token by token.

    NONE leaves it. RENORM scales it to the length of the conditional prediction (Qwen-Image); RENORM_CLIPPED does so
    only where guidance made it longer (LongCat-Image).
    """

    NONE = "NONE"
    RENORM = "RENORM"
    RENORM_CLIPPED = "RENORM_CLIPPED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """How one request is guided.

    `scale` is the embedded guidance of distilled models, None where the model has none. `true_cfg_scale` is
    classifier-free guidance over two predictions (Ho & Salimans 2022, eq. 6, in the form uncond + s * (cond - uncond)
    unless the model writes it otherwise); 1 is off. `rescale` is the share of the guided prediction that is brought to
    the standard deviation of the conditional one (Lin et al. 2023, section 3.4). Guidance is on from the fraction
    `interval_start` of the steps until before `interval_end` (Kynkaanniemi et al. 2024); outside of it the second
    prediction is not made.

    Models with two experts have a `boundary_ratio`, the fraction of the training timesteps at which the expert for low
    noise takes over, and with classifier-free guidance `scale_low_noise`, the scale from there on; else None.
    """

    scale: float | None = None
    true_cfg_scale: float = 1.0
    norm: GuidanceNorm = GuidanceNorm.NONE
    rescale: float = 0.0
    interval_start: float = 0.0
    interval_end: float = 1.0
    scale_low_noise: float | None = None
    boundary_ratio: float | None = None

    def covers(self, index: int, steps: int) -> bool:
        """Whether step `index` (from 0) of `steps` lies in the interval."""
        return self.interval_start <= index / steps < self.interval_end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceDraft:
    """Guidance as requested. None means "not given"."""

    scale: float | None = None
    true_cfg_scale: float | None = None
    norm: GuidanceNorm | None = None
    rescale: float | None = None
    interval_start: float | None = None
    interval_end: float | None = None
    scale_low_noise: float | None = None
    boundary_ratio: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options that only some generations have. None: not given, or of no use to the task or the model.

    `scheduler` is a class name in diffusers; empty: the checkpoint's own. `shift` replaces its rule of shifting the
    levels, `scheduler_config` entries of its config; `sigmas` are the levels before the shift, one for each step.
    `preset` is the name of a preset: in a Request, of the one that it was completed by.
    """

    preview: Preview | None = None
    inputs: Inputs = Inputs()
    strength: float | None = None
    layers: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    output_fps: float | None = None
    duration: float | None = None
    start: float | None = None
    sample_rate_hz: int | None = None
    text: str = ""
    scheduler: str = ""
    scheduler_config: Mapping[str, object] = dataclasses.field(default_factory=dict)
    shift: float | None = None
    sigmas: tuple[float, ...] = ()
    preset: str = ""
    loras: tuple[Lora, ...] = ()
    extra: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draft(_Options):
    """One generation as it was asked for. None means "not given", which is never the same as zero or the empty string.

    `seeds` has one entry per output; with a single entry s, output i uses s + i. Sizes are in pixels.
    `resolve.resolve_request` makes a Request of it, or refuses. With `embed_parameters` the outputs say how they were
    made; `input_traits` is what they say of the inputs.
    """

    model: str
    prompt: str
    task: Task = Task.TEXT_TO_IMAGE
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: GuidanceDraft = GuidanceDraft()
    seeds: tuple[int, ...] = ()
    num_outputs: int | None = None
    output_format: OutputFormat | None = None
    cache: CacheDraft | None = None
    embed_parameters: bool = False
    input_traits: Traits = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request(_Options):
    """One generation that has been checked and completed: what the engine and the models work on.

    `negative_prompt` is None exactly where classifier-free guidance is off, or where `extra` has its embeddings.
    `seeds` has one entry per output. Width and height are 0 for sound. `cache` is None where no step cache may answer
    for it, `embedding` where nothing is written into the outputs.
    """

    id: str
    model: str
    prompt: str
    task: Task
    negative_prompt: str | None
    width: int
    height: int
    steps: int
    guidance: Guidance
    seeds: tuple[int, ...]
    num_outputs: int
    output_format: OutputFormat
    cache: RequestCache | None = None
    embedding: Embedding | None = None


def has_negative(of: Draft | Request) -> bool:
    """Whether there is something to guide away from: a text, or the embeddings of one."""
    return of.negative_prompt is not None or of.extra.get("negative_prompt_embeds") is not None
