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
from omni_grpc.request import Guidance, Request

COND = "cond"
"""The branch that follows the prompt."""
UNCOND = "uncond"
"""The branch that follows the negative prompt; present where classifier-free guidance is on."""


class Tables(dict[str, Tensor]):
    """The modulation of every step, [steps, levels, ...] by name. A plain dict could not be referenced weakly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cond:
    """What one branch is conditioned on, computed once. The outputs of a request share it.

    row: the lengths of the sequence.
    constants: name -> (stream, tensor [tokens in that stream, ...]): what is the same in every step.
    tables: what changes with the step alone; a batch binds one step's slice of each to "mod".
    """

    row: Row
    constants: Mapping[str, tuple[str, Tensor]]
    tables: Tables


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class State:
    """One output of one request, from prepare to decode.

    latents: [T, C], the tokens being denoised, packed by `stream`; `grid` says how they lie in the picture.
    index: the step that comes next.
    slots: what features keep from step to step, by (feature, branch); what is kept there owns its memory.
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
    cond: dict[str, Cond] = dataclasses.field(default_factory=dict)
    index: int = 0
    slots: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    prompt_tokens: int = 0
    dropped_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of the next step: outside of the guidance interval the conditional one is enough."""
        if UNCOND in self.cond and not self.guidance.covers(self.index, self.schedule.steps):
            return (COND,)
        return tuple(self.cond)
