"""Pipeline: what a model family implements, and all of it."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import torch
from torch import Tensor, nn

from omni_grpc.nn.rows import Rows
from omni_grpc.pipeline.images import Image
from omni_grpc.pipeline.state import State
from omni_grpc.request import Request
from omni_grpc.spec import Checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Next:
    """The step is done and another follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """The step needs one more prediction, at the latents as they are now (samplers of second order)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A part of the output is finished: decode it now, then go on (long video, autoregressive models)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The last step is done: decode."""


Outcome = Next | Again | Segment | Done


class Pipeline(nn.Module, abc.ABC):
    """One model. It holds weights; what it learns about a request is in that request's states."""

    @classmethod
    @abc.abstractmethod
    def load(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Self:
        """The pipeline with its weights on the device. Raises CheckpointError where the checkpoint does not fit."""

    @abc.abstractmethod
    def prepare(self, request: Request) -> list[State]:
        """One state per output: text encoded, noise drawn, and all that does not depend on the step computed.

        The branch of the negative prompt is there exactly where `request.negative_prompt` is not None.
        """

    @abc.abstractmethod
    def predict(self, batch: Rows) -> Tensor:
        """One forward of the denoiser over packed rows -> the prediction for each token of `batch["latents"]`."""

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        """Moves the state one step on, given its guided prediction [T, C]."""
        state.latents = state.schedule.step(state.latents, prediction, state.index, state.generator)
        state.index += 1
        return Next() if state.index < state.schedule.steps else Done()

    @abc.abstractmethod
    def decode(self, state: State) -> list[Image]:
        """The finished latents as images."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a pipeline is not called: the engine calls prepare, predict, advance and decode")
