"""State: everything that the worker knows about one output of one request. Modules hold weights only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omni_grpc.nn.rows import Row
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Schedule
from omni_grpc.types.request import Guidance, Request

COND = "cond"
"""The branch that follows the prompt."""
UNCOND = "uncond"
"""The branch that follows the negative prompt; present where classifier-free guidance is on."""


def prompts(request: Request) -> dict[str, tuple[str, str]]:
    """The texts of a request: field -> the branch that follows it, and the text itself."""
    texts = {"prompt": (COND, request.prompt)}
    if request.negative_prompt is not None:
        texts["negative_prompt"] = (UNCOND, request.negative_prompt)
    return texts


class Tables(dict[str, Tensor]):
    """The modulation of every evaluation, [evaluations, levels, ...] by name. A dict cannot be referenced weakly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What one branch is conditioned on, computed once. The outputs of a request share it.

    row: the lengths of the sequence.
    constants: name -> (stream, tensor [tokens in that stream, ...]): what is the same in every step.
    tables: what changes with the timestep alone; a batch binds one evaluation's slice of each to "mod".
    """

    row: Row
    constants: Mapping[str, tuple[str, Tensor]]
    tables: Tables


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrecomputedStep:
    """The result of an evaluation for one state, computed for all states of a batch at once.

    prediction: [T, C], guided. latents: [T, C], after the step. nonfinite: int32 [], 0 where those latents are finite.
    """

    evaluation: int
    prediction: Tensor
    latents: Tensor
    nonfinite: Tensor


@dataclasses.dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class State:
    """One output of one request, from prepare to decode.

    latents: [T, C], the tokens being denoised, packed by `stream`; `grid` says how they lie in the picture.
    context: [T', C], tokens that follow the latents in their stream and that no step changes: pictures to go by,
    padding that is attended. The prediction for them is dropped.
    evaluation: the prediction that comes next, counted through all steps of the schedule.
    segment: the part of the output that is being denoised, of `segments`; each has a schedule of as many steps.
    slots: what features keep from evaluation to evaluation, by (feature, branch); what is kept there owns its memory.
    It is emptied where a segment ends.
    reports: what features tell of the evaluation at hand, by (feature, branch), to be added up with `+`. The worker
    empties it before each evaluation.
    ahead: what the evaluation at hand makes of the state; None where its schedule has to say.
    prompt_tokens: tokens of the prompt that condition the output. dropped_tokens: per prompt field, how many did not
    fit.
    """

    request: Request
    output: int
    seed: int
    generator: torch.Generator
    latents: Tensor
    grid: Grid
    schedule: Schedule
    guidance: Guidance
    stream: str = "img"
    context: Tensor | None = None
    cond: dict[str, Conditioning] = dataclasses.field(default_factory=dict)
    evaluation: int = 0
    segment: int = 0
    segments: int = 1
    slots: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    reports: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    ahead: PrecomputedStep | None = None
    prompt_tokens: int = 0
    dropped_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def index(self) -> int:
        """The step that the next evaluation belongs to."""
        return self.schedule.step_of(self.evaluation)

    @property
    def steps_done(self) -> int:
        """Steps of all segments so far."""
        return self.segment * self.schedule.steps + self.index

    @property
    def steps(self) -> int:
        """Steps of all segments together."""
        return self.segments * self.schedule.steps

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of the next evaluation: outside of the guidance interval the conditional one is enough."""
        if UNCOND in self.cond and not self.guidance.covers(self.index, self.schedule.steps):
            return (COND,)
        return tuple(self.cond)
