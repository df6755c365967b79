"""What comes back from a generation: artifacts, what was really done, times, and warnings. Plain frozen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from omni_grpc.types.findings import ModelExecution
from omni_grpc.types.lora import AppliedLora
from omni_grpc.types.media import OutputFormat
from omni_grpc.types.renamed import renamed
from omni_grpc.types.request import Guidance
from omni_grpc.types.step_cache import CacheCount, FixedCache, RequestCache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestWarning:
    """A decision made for the user, or an option of theirs that had no effect."""

    code: str
    field: str
    message: str
    requested: str = ""
    applied: str = ""


@renamed(sample_rate="sample_rate_hz")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effective(ModelExecution):
    """What was really done, including how the worker executes the model. `evals` counts denoiser forwards;
    `defaults_used` maps a field to the default it got. `sigmas` are the noise levels that were visited, one for each
    step and the last one; none where they are not known. `shift`: None where the schedule has none.
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
    sample_rate_hz: int = 0
    cache: RequestCache | FixedCache | None = None
    loras: tuple[AppliedLora, ...] = ()
    shift: float | None = None
    sigmas: tuple[float, ...] = ()
    preset: str = ""
    defaults_used: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dropped_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Where the time went, in seconds. `postprocess`: from pixels or samples to files; `steps_cached`: a cache answered
    every row; `stage_durations`: by target.
    """

    queue_wait: float = 0.0
    encode: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    postprocess: float = 0.0
    total: float = 0.0
    steps_run: int = 0
    steps_cached: int = 0
    cache: tuple[CacheCount, ...] = ()
    peak_memory_bytes: int = 0
    stage_durations: Mapping[str, float] = dataclasses.field(default_factory=dict)


@renamed(id="artifact_id", sample_rate="sample_rate_hz")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A produced file without its bytes; those are in the artifact store under `artifact_id`. `index` is the output
    that it is of, `layer` which layer of that, from 0 at the bottom; None where there are no layers.
    """

    artifact_id: str
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
    sample_rate_hz: int = 0
    duration: float = 0.0
    has_alpha: bool = False
    layer: int | None = None
