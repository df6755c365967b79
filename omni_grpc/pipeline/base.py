"""Pipeline: the interface of a model. Model families implement it through ImagePipeline or LatentDiffusionPipeline."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from omni_grpc.loading.loader import Loader
from omni_grpc.nn.rows import Rows
from omni_grpc.pipeline.outputs import Output, join
from omni_grpc.pipeline.state import State
from omni_grpc.types.request import Guidance, Request


@dataclasses.dataclass(frozen=True, slots=True)
class NextStep:
    """The step is done, and another one follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnotherPrediction:
    """The step needs one more prediction, at the current latents (samplers of second order)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SegmentFinished:
    """A segment of the output is finished: decode it now, while the next one is denoised (long videos).

    latents: [T, C], to be decoded. The state has already moved to its next segment, and its `evaluation` is 0 again.
    """

    latents: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The last step is done: decode the state's latents."""


Outcome = NextStep | AnotherPrediction | SegmentFinished | Finished


Predict = Callable[[Rows], Tensor]
"""`Pipeline.predict`, or a feature around it."""


class Pipeline(nn.Module, abc.ABC):
    """One model. It holds weights; everything about a request is in the states of that request."""

    _wrapped: Predict | None = None

    @classmethod
    @abc.abstractmethod
    def load(cls, loader: Loader) -> Self:
        """Loads the pipeline. Raises CheckpointError for a checkpoint that does not fit."""

    @abc.abstractmethod
    def prepare(self, request: Request) -> list[State]:
        """One state per output: prompts encoded, noise drawn, and everything computed that does not depend on the
        latents.

        A state has the branch of the negative prompt if and only if `request.negative_prompt` is not None.
        """

    @abc.abstractmethod
    def predict(self, batch: Rows) -> Tensor:
        """One forward of the denoiser over packed rows -> a prediction for each token of `batch["latents"]`, [T, C]."""

    def wrap_predict(self, middleware: Callable[[Predict], Predict]) -> None:
        """Puts a feature around `predict`, where `predict_all` calls it."""
        self._wrapped = middleware(self._wrapped or self.predict)

    def predict_all(self, batch: Rows) -> Tensor:
        """`predict` with the features that are around it, [T, C]."""
        return self.predict(batch) if self._wrapped is None else self._wrapped(batch)

    def guidance(self, state: State) -> Guidance:
        """How classifier-free guidance combines the predictions of the state's next evaluation."""
        return state.guidance

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        """Moves the state on by one evaluation, given its guided prediction [T, C]."""
        return advance(state, prediction)

    @abc.abstractmethod
    def decode(self, state: State, latents: Tensor) -> list[Output]:
        """Decodes finished latents [T, C]: those of the state, or of one of its segments."""

    @property
    def tile_area(self) -> int:
        """Pixels of the tiles that it can decode in; 0 where it cannot."""
        return 0

    def in_tiles(self, tiled: bool) -> contextlib.AbstractContextManager[None]:
        """Whether `decode` goes by tiles meanwhile, where it can. Only the thread that decodes may call it."""
        return contextlib.nullcontext()

    def join(self, parts: Sequence[Output]) -> Output:
        """Joins the decoded segments of one output. The default puts them end to end."""
        return join(parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a pipeline is not called: the engine calls prepare, predict, advance and decode")


def advance(state: State, prediction: Tensor) -> Outcome:
    """Takes one evaluation of the state's schedule, given the guided prediction [T, C]. A step that was already
    computed from this very prediction is reused.
    """
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
