"""Steps that are computed for a whole batch at once, against those that each state takes by itself."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.pipeline.base import Finished, NextStep, Outcome, Pipeline, advance
from omni_grpc.pipeline.batch import advance as advance_state
from omni_grpc.pipeline.batch import assemble, predict
from omni_grpc.pipeline.guidance import combine
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule
from omni_grpc.pipeline.state import COND, UNCOND, Conditioning, State, Tables
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance, GuidanceNorm, Request, Task

EULER, HEUN = "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"
REQUEST = Request(
    id="job",
    model="toy",
    prompt="a star",
    task=Task.TEXT_TO_IMAGE,
    negative_prompt="",
    width=16,
    height=16,
    steps=3,
    guidance=Guidance(),
    seeds=(0,),
    num_outputs=1,
    output_format=ImageFormat.PNG,
)


class Toy(Pipeline):
    """Predicts what it was made with, the tokens of context behind each row included."""

    def __init__(self, *, changed: bool = False) -> None:
        super().__init__()
        self.changed = changed

    @classmethod
    def load(cls, loader: object) -> Toy:
        raise NotImplementedError

    def prepare(self, request: Request) -> list[State]:
        raise NotImplementedError

    def decode(self, state: State, latents: Tensor) -> list:
        raise NotImplementedError

    def predict(self, batch: Rows) -> Tensor:
        generator = torch.Generator().manual_seed(batch.owners[0][0].evaluation)
        return torch.randn(batch["latents"].shape, generator=generator)

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        return advance(state, 2 * prediction if self.changed else prediction)


def state(tokens: int, guidance: Guidance | None, scheduler: str = EULER, **config: object) -> State:
    row = Row.of(img=tokens + 2)
    cond = Conditioning(row=row, constants={}, tables=Tables(t=torch.zeros(9, 1, 1)))
    return State(
        request=REQUEST,
        output=0,
        seed=0,
        generator=torch.Generator().manual_seed(0),
        latents=torch.randn(tokens, 4, generator=torch.Generator().manual_seed(tokens)),
        context=torch.full((2, 4), 9.0),
        grid=Grid(height=1, width=tokens),
        schedule=Schedule({"_class_name": EULER, **config}, Levels(steps=3), device="cpu", name=scheduler),
        guidance=guidance or Guidance(),
        cond={COND: cond} if guidance is None else {COND: cond, UNCOND: cond},
    )


UNLIKE = [
    None,
    Guidance(true_cfg_scale=4.0),
    Guidance(true_cfg_scale=4.0, norm=GuidanceNorm.RENORM),
    Guidance(true_cfg_scale=3.0, norm=GuidanceNorm.RENORM_CLIPPED, rescale=0.3),
    Guidance(true_cfg_scale=2.5, rescale=0.7),
    Guidance(true_cfg_scale=2.5, interval_start=0.5),
]


@pytest.mark.parametrize("changed", [False, True])
def test_steps_that_are_taken_together_are_those_that_each_state_takes(changed: bool) -> None:
    """Also where a pipeline makes something else of the prediction."""
    toy, layouts = Toy(changed=changed), LayoutCache("cpu")
    states = [state(5 + n, guidance) for n, guidance in enumerate(UNLIKE)]
    oracles = copy.deepcopy(states)
    for step in range(3):
        predictions = predict(toy, assemble(states, layouts))
        for it, oracle in zip(states, oracles, strict=True):
            assert it.ahead is not None
            guided = combine(predictions[it], it.guidance)
            outcome = advance_state(toy, it, predictions[it])
            oracle.ahead = None
            assert isinstance(advance(oracle, guided * (2 if changed else 1)), type(outcome))
            assert isinstance(outcome, Finished if step == 2 else NextStep)
            torch.testing.assert_close(it.latents, oracle.latents, rtol=1e-6, atol=1e-6)
            assert it.evaluation == oracle.evaluation == step + 1
            assert it.ahead.nonfinite.item() == 0
            assert (it.ahead.latents is it.latents) is not changed


def test_other_schedules_take_their_steps_themselves() -> None:
    for it in (state(4, UNLIKE[1], HEUN), state(4, UNLIKE[1], stochastic_sampling=True)):
        predictions = predict(Toy(), assemble([it, state(3, None)], LayoutCache("cpu")))
        assert it.ahead is None
        oracle = copy.deepcopy(it)
        advance(oracle, combine(predictions[it], it.guidance))
        advance_state(Toy(), it, predictions[it])
        assert torch.equal(it.latents, oracle.latents)


def test_a_step_is_counted_in_its_turn_and_where_it_is_eulers() -> None:
    schedule = state(1, None).schedule
    assert [schedule.width(n) for n in range(3)] == pytest.approx(
        [b - a for a, b in itertools.pairwise(schedule.sigmas)]
    )
    schedule.skip(0)
    with pytest.raises(ValueError, match="evaluation 0 was asked for, the next one is 1"):
        schedule.skip(0)
    heun = state(1, None, HEUN).schedule
    assert heun.width(0) is None
    with pytest.raises(ValueError, match="has to take evaluation 0 itself"):
        heun.skip(0)


def test_what_is_left_of_an_evaluation_that_failed_is_not_used() -> None:
    it = state(4, None)
    predict(Toy(), assemble([it], LayoutCache("cpu")))
    stale = it.ahead
    assert stale is not None
    again = predict(Toy(), assemble([it], LayoutCache("cpu")))
    assert it.ahead is not stale
    before = it.latents
    advance_state(Toy(), it, again[it])
    assert not torch.equal(it.latents, before)
    # what was computed ahead was of an evaluation before
    following = state(4, None)
    predictions = {COND: torch.ones(4, 4)}
    following.schedule.skip(0)
    following.evaluation, following.latents = 1, it.latents
    advance_state(Toy(), following, predictions)
    advance_state(Toy(), it, predictions)
    assert torch.equal(it.latents, following.latents)
