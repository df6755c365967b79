"""The events of one job, in the order in which they can appear: one of Completed, Failed and Cancelled ends it."""

from __future__ import annotations

import dataclasses

from omni_grpc.types.errors import Failure
from omni_grpc.types.renamed import renamed
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats


@renamed(depth="queue_depth")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Accepted; `position` counts the jobs before this one, `queue_depth` those that wait, this one included."""

    position: int
    queue_depth: int


@renamed(steps="total_steps")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Left the queue. The seeds and the size are the real ones, after every default and rounding. `total_steps` counts
    the steps to come, of all segments together.
    """

    model: str
    seeds: tuple[int, ...]
    width: int
    height: int
    total_steps: int
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
class EncodeDone:
    """Prompts are encoded and noise is drawn: the next thing to happen is a denoise step."""

    elapsed: float
    prompt_tokens: int


@renamed(total="total_steps", rows="rows_total", segments="total_segments")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """`step` of `total_steps` is done (1-based), from `sigma` and `timestep`. Times in seconds; `eta` is NaN where
    there is no estimate. `rows_total` counts the rows that the request had in the step, `rows_reused` those that a step
    cache answered. `segment` (0-based) is the part of the output that the step belongs to, of `total_segments`, which
    is at least 1 here and 0 in the API where the output has one part.
    """

    step: int
    total_steps: int
    sigma: float
    timestep: float
    step_time: float
    elapsed: float
    eta: float
    rows_total: int
    rows_reused: int = 0
    evals: int = 1
    segment: int = 0
    total_segments: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Set aside after `completed_steps` steps, because `position` jobs of a higher rank take theirs first."""

    completed_steps: int
    reason: str
    position: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Takes steps again, after `wait` seconds of preemption."""

    completed_steps: int
    wait: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProgress:
    """Denoising is done; latents are being turned into media."""

    done_units: int
    total_units: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReady:
    """One output can be downloaded."""

    artifact: Artifact


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
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
    | EncodeDone
    | StepProgress
    | Preempted
    | Resumed
    | DecodeProgress
    | ArtifactReady
    | Completed
    | Failed
    | Cancelled
)


TERMINAL = (Completed, Failed, Cancelled)
