"""Which branches of a state take its next step."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.nn.rows import Row
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule
from omni_grpc.pipeline.state import COND, UNCOND, Conditioning, State, Tables
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance, Request, Task


def state(guidance: Guidance, *, branches: tuple[str, ...] = (COND, UNCOND), steps: int = 4) -> State:
    request = Request(
        id="job",
        model="toy",
        prompt="a star",
        task=Task.TEXT_TO_IMAGE,
        negative_prompt="",
        width=2,
        height=2,
        steps=steps,
        guidance=guidance,
        seeds=(1,),
        num_outputs=1,
        output_format=ImageFormat.PNG,
    )
    sigmas = [1 - step / steps for step in range(steps)]
    cond = Conditioning(row=Row.of(txt=1, img=1), constants={}, tables=Tables())
    return State(
        request=request,
        output=0,
        seed=1,
        generator=torch.Generator(),
        latents=torch.zeros(1, 4),
        grid=Grid(height=1, width=1, patch=2),
        schedule=Schedule(
            {"_class_name": "FlowMatchEulerDiscreteScheduler"}, Levels(steps=steps, sigmas=sigmas), device="cpu"
        ),
        guidance=guidance,
        cond=dict.fromkeys(branches, cond),
    )


def guided_steps(it: State) -> list[int]:
    taken = []
    for index in range(it.schedule.steps):
        it.evaluation = index
        assert it.branches in ((COND,), (COND, UNCOND))
        if UNCOND in it.branches:
            taken.append(index)
    return taken


@pytest.mark.parametrize(
    ("start", "end", "steps", "expected"),
    [
        (0.0, 1.0, 4, [0, 1, 2, 3]),
        (0.25, 0.75, 4, [1, 2]),
        (0.26, 0.75, 4, [2]),
        (0.0, 0.5, 4, [0, 1]),
        (0.0, 0.51, 4, [0, 1, 2]),
        (0.5, 1.0, 3, [2]),
        (0.9, 1.0, 4, []),
        (0.0, 0.01, 1, [0]),
    ],
)
def test_the_second_branch_steps_within_the_interval(start: float, end: float, steps: int, expected: list[int]) -> None:
    guidance = Guidance(true_cfg_scale=4.0, interval_start=start, interval_end=end)
    assert guided_steps(state(guidance, steps=steps)) == expected


def test_without_a_negative_prompt_there_is_one_branch() -> None:
    assert guided_steps(state(Guidance(), branches=(COND,))) == []


def test_the_branch_outside_of_the_interval_is_kept_for_later() -> None:
    it = state(Guidance(true_cfg_scale=4.0, interval_start=0.5))
    assert it.branches == (COND,)
    assert set(it.cond) == {COND, UNCOND}
