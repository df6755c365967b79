"""Pipeline: what a model family implements, and all of it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from omni_grpc.loading.loader import Loader
from omni_grpc.nn.rows import Rows
from omni_grpc.pipeline.outputs import Output, join
from omni_grpc.pipeline.state import State
from omni_grpc.types.request import Guidance, Request


@dataclasses.dataclass(frozen=True, slots=True)
class NextStep:
    """The step is done and another follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnotherPrediction:
    """The step needs one more prediction, at the latents as they are now (samplers of second order)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SegmentFinished:
    """A part of the output is finished: decode it now, while the next part takes its steps (long video).

    latents: [T, C], what `decode` gets. The state has moved on to its next part: `segment` counts it, and `evaluation`
    is 0 again.
    """

    latents: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The last step is done: decode."""


Outcome = NextStep | AnotherPrediction | SegmentFinished | Finished


class Pipeline(nn.Module, abc.ABC):
    """One model. It holds weights; what it learns about a request is in that request's states."""

    @classmethod
    @abc.abstractmethod
    def load(cls, loader: Loader) -> Self:
        """The pipeline with its weights in place. Raises CheckpointError where the checkpoint does not fit."""

    @abc.abstractmethod
    def prepare(self, request: Request) -> list[State]:
        """One state per output: text encoded, noise drawn, and all that does not depend on the step computed.

        The branch of the negative prompt is there exactly where `request.negative_prompt` is not None.
        """

    @abc.abstractmethod
    def predict(self, batch: Rows) -> Tensor:
        """One forward of the denoiser over packed rows -> a prediction for each token of `batch["latents"]`, [T, C]."""

    def guidance(self, state: State) -> Guidance:
        """How the predictions of the state's next evaluation are combined."""
        return state.guidance

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        """Moves the state one evaluation on, given its guided prediction [T, C]."""
        return advance(state, prediction)

    @abc.abstractmethod
    def decode(self, state: State, latents: Tensor) -> list[Output]:
        """Finished latents [T, C] as outputs: those of the state or, before it is done, of one of its segments."""

    def join(self, parts: Sequence[Output]) -> Output:
        """The decoded segments of one output as one. The default puts them end to end."""
        return join(parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a pipeline is not called: the engine calls prepare, predict, advance and decode")


def advance(state: State, prediction: Tensor) -> Outcome:
    """Takes one evaluation of the state's schedule: the step from this prediction that was computed ahead, if any."""
    step, ahead = state.index, state.ahead
    if ahead is not None and ahead.prediction is prediction and ahead.evaluation == state.evaluation:
        state.schedule.skip(state.evaluation)
        state.latents = ahead.latents
    else:
        state.latents = state.schedule.step(state.latents, prediction, state.evaluation, state.generator)
    state.evaluation += 1
    if state.evaluation == state.schedule.evaluations:
        return Finished()
    return AnotherPrediction() if state.index == step else NextStep()
