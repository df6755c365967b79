"""What a user asks for and what the engine says while it works: plain frozen data, no torch, no grpc."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from omni_grpc.errors import Failure
from omni_grpc.tuning import AppliedLora, CacheCount, CacheDraft, FixedCache, Lora, TeaCache


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


class ImageFormat(enum.StrEnum):
    """How an image is encoded. RAW_RGB8 is height x width x 3 bytes, row by row, for callers on the same network."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    RAW_RGB8 = "RAW_RGB8"

    @property
    def mime_type(self) -> str:
        return "application/octet-stream" if self is ImageFormat.RAW_RGB8 else f"image/{self.value.lower()}"


class VideoFormat(enum.StrEnum):
    """How a video is encoded: H.264 in MP4 with its index in front, VP9 in WebM, or H.264 in fragmented MP4."""

    MP4 = "MP4"
    WEBM = "WEBM"
    FMP4 = "FMP4"

    @property
    def mime_type(self) -> str:
        return "video/webm" if self is VideoFormat.WEBM else "video/mp4"


class AudioFormat(enum.StrEnum):
    """How sound is encoded: 16-bit PCM, lossless, or lossy (Opus in an Ogg container)."""

    WAV = "WAV"
    FLAC = "FLAC"
    MP3 = "MP3"
    OPUS = "OPUS"

    @property
    def mime_type(self) -> str:
        return {"WAV": "audio/wav", "FLAC": "audio/flac", "MP3": "audio/mpeg", "OPUS": "audio/ogg"}[self.value]


OutputFormat = ImageFormat | VideoFormat | AudioFormat


class Modality(enum.StrEnum):
    """What a task makes."""

    IMAGE = "IMAGE"
    VIDEO = "VIDEO"
    AUDIO = "AUDIO"


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
    """Guidance as it was asked for. None means "not given"."""

    scale: float | None = None
    true_cfg_scale: float | None = None
    norm: GuidanceNorm | None = None
    rescale: float | None = None
    interval_start: float | None = None
    interval_end: float | None = None
    scale_low_noise: float | None = None
    boundary_ratio: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Pictures of the state between steps: a linear map from latent channels to RGB, one every `every_steps` steps.

    `max_edge` is the longer side in pixels at most.
    """

    every_steps: int = 1
    max_edge: int = 256
    format: ImageFormat = ImageFormat.WEBP


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewImage:
    """One encoded preview of one output."""

    index: int
    mime_type: str
    data: bytes
    width: int
    height: int


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInput:
    """A decoded picture: height x width x channels bytes, row by row; 1 channel is a mask, 3 RGB, 4 RGB with alpha."""

    width: int
    height: int
    channels: int
    data: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class VideoInput:
    """A decoded video: frames x height x width x 3 bytes, RGB."""

    width: int
    height: int
    num_frames: int
    fps: float
    data: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class AudioInput:
    """Decoded sound: channels x samples little-endian float32 in -1..1, one channel after the other."""

    channels: int
    sample_rate: int
    data: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The media that a request brings along, decoded; what it does not bring is None or empty."""

    images: tuple[ImageInput, ...] = ()
    mask: ImageInput | None = None
    first_frame: ImageInput | None = None
    last_frame: ImageInput | None = None
    reference_images: tuple[ImageInput, ...] = ()
    source_video: VideoInput | None = None
    control_video: VideoInput | None = None
    mask_video: VideoInput | None = None
    audio: AudioInput | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The names of those that are there."""
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a generation may have besides what every one has. None: not given, or of no use to the task or the model.

    `scheduler` is a class name in diffusers; empty: the checkpoint's own.
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
    sample_rate: int | None = None
    text: str = ""
    scheduler: str = ""
    loras: tuple[Lora, ...] = ()
    extra: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draft(_Options):
    """One generation as it was asked for. None means "not given", which is never the same as zero or the empty string.

    `seeds` has one entry per output; with a single entry s, output i uses s + i. Sizes are in pixels.
    `resolve.resolve_request` makes a Request of it, or refuses.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request(_Options):
    """One generation that has been checked and completed: what the engine and the models work on.

    `negative_prompt` is None exactly where classifier-free guidance is off; `seeds` has one entry per output. Width and
    height are 0 for sound. `cache` is None where no step cache may answer for it.
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
    cache: TeaCache | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestWarning:
    """Something that was decided for the user, or that they asked for and that had no effect."""

    code: str
    field: str
    message: str
    requested: str = ""
    applied: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """What was really done. `evals` counts denoiser forwards; `quantized_layers` layers by scheme, `kept_layers` those
    beside them in full precision; `defaults_used` maps a field to the default it got.
    """

    width: int
    height: int
    steps: int
    evals: int
    seeds: tuple[int, ...]
    guidance: Guidance
    scheduler: str
    output_format: OutputFormat
    strength: float | None = None
    layers: int = 0
    num_frames: int = 0
    fps: float = 0.0
    output_fps: float = 0.0
    duration: float = 0.0
    sample_rate: int = 0
    attention_backend: str = ""
    cache: TeaCache | FixedCache | None = None
    loras: tuple[AppliedLora, ...] = ()
    quantized_layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kept_layers: int = 0
    batch_invariant: bool = False
    defaults_used: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dropped_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Where the time went, in seconds. `steps_cached`: a cache answered every row; `stage_durations`: by target."""

    queue_wait: float = 0.0
    encode: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    steps_run: int = 0
    steps_cached: int = 0
    cache: tuple[CacheCount, ...] = ()
    peak_memory_bytes: int = 0
    stage_durations: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A produced file without its bytes; those are in the artifact store under `id`. `index` is the output that it is
    of, `layer` which layer of that, from 0 at the bottom; None where there are no layers.
    """

    id: str
    job_id: str
    index: int
    mime_type: str
    size_bytes: int
    sha256: str
    width: int
    height: int
    seed: int
    num_frames: int = 0
    fps: float = 0.0
    sample_rate: int = 0
    duration: float = 0.0
    has_alpha: bool = False
    layer: int | None = None


# The events of one job, in the order in which they can appear. Exactly one of Done, Failed and Cancelled ends a job.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Accepted; `position` counts the jobs before this one."""

    position: int
    depth: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Left the queue. The seeds and the size are the real ones, after every default and rounding."""

    model: str
    seeds: tuple[int, ...]
    width: int
    height: int
    steps: int
    queue_wait: float
    warnings: tuple[RequestWarning, ...] = ()
    attempt: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """The worker was lost before it had done anything for the job, which is queued again in its old place. `delay` is
    the least time in seconds until `attempt` of `max_attempts` can start.
    """

    failure: Failure
    attempt: int
    max_attempts: int
    delay: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Prompts are encoded and noise is drawn: the next thing to happen is a denoise step."""

    elapsed: float
    prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`step` of `total` is done (1-based), from `sigma` and `timestep`. Times in seconds. `segment` (0-based) is the
    part of the output that the step belongs to, of `segments`.
    """

    step: int
    total: int
    sigma: float
    timestep: float
    step_time: float
    elapsed: float
    eta: float
    rows: int
    rows_reused: int = 0
    evals: int = 1
    segment: int = 0
    segments: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Set aside after `completed_steps` steps, because `position` jobs of a higher rank take theirs first."""

    completed_steps: int
    reason: str
    position: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Takes its steps again, after `wait` seconds aside."""

    completed_steps: int
    wait: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Denoising is done; latents are being turned into media."""

    done_units: int
    total_units: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReady:
    """One output can be downloaded."""

    artifact: Artifact


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Terminal: all outputs are ready."""

    artifacts: tuple[Artifact, ...]
    effective: Effective
    warnings: tuple[RequestWarning, ...]
    stats: Stats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Terminal: the job ended without its outputs, and why."""

    failure: Failure
    stats: Stats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Terminal: the job was stopped on request, after `completed_steps` steps."""

    reason: str
    completed_steps: int
    stats: Stats


Event = (
    Queued
    | Started
    | Retrying
    | Encoded
    | Step
    | Preempted
    | Resumed
    | Decoding
    | ArtifactReady
    | Done
    | Failed
    | Cancelled
)
TERMINAL = (Done, Failed, Cancelled)
