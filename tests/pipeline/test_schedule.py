"""The schedule of one output, against diffusers' scheduler and pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from omni_grpc.errors import CheckpointError
from omni_grpc.pipeline.schedule import Schedule, dynamic_shift

CONFIG = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def sigmas(steps: int) -> list[float]:
    return np.linspace(1.0, 1 / steps, steps).tolist()


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_are_those_of_diffusers(steps: int) -> None:
    oracle = FlowMatchEulerDiscreteScheduler.from_config(CONFIG)
    oracle.set_timesteps(sigmas=sigmas(steps), mu=0.6)
    schedule = Schedule(CONFIG, sigmas(steps), mu=0.6, device="cpu")
    assert schedule.steps == steps
    assert schedule.sigmas == tuple(oracle.sigmas.tolist())
    assert schedule.timesteps == tuple(oracle.timesteps.tolist())
    mine = theirs = torch.randn(3, 4)
    for index in range(steps):
        velocity = torch.randn(3, 4)
        mine = schedule.step(mine, velocity, index)
        theirs = oracle.step(velocity, oracle.timesteps[index], theirs, return_dict=False)[0]
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_single_step_is_not_stretched() -> None:
    """diffusers divides 0 by 0 there; ours is what it gives without shift_terminal."""
    broken = FlowMatchEulerDiscreteScheduler.from_config(CONFIG)
    broken.set_timesteps(sigmas=[1.0], mu=0.6)
    assert broken.sigmas.isnan().any()
    schedule = Schedule(CONFIG, [1.0], mu=0.6, device="cpu")
    assert schedule.sigmas == (1.0, 0.0)
    latents, velocity = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(schedule.step(latents, velocity, 0), latents - velocity)


def test_steps_are_taken_in_order() -> None:
    schedule = Schedule(CONFIG, sigmas(3), mu=0.6, device="cpu")
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="step 1 was asked for, but the next one is 0"):
        schedule.step(x, x, 1)
    schedule.step(x, x, 0)
    with pytest.raises(ValueError, match="step 0 was asked for, but the next one is 1"):
        schedule.step(x, x, 0)


def test_noise_of_a_stochastic_scheduler_comes_from_the_generator() -> None:
    config = CONFIG | {"stochastic_sampling": True}
    x = torch.zeros(4, 4)

    def once(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return Schedule(config, sigmas(2), mu=0.6, device="cpu").step(x, x, 0, generator)

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))


def test_a_scheduler_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'UniPCMultistepScheduler' is not served yet"):
        Schedule({"_class_name": "UniPCMultistepScheduler"}, sigmas(2), mu=None, device="cpu")


@pytest.mark.parametrize("tokens", [1, 256, 4096, 16384])
@pytest.mark.parametrize("config", [CONFIG, {}])
def test_dynamic_shift_is_that_of_diffusers(config: dict, tokens: int) -> None:
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    assert dynamic_shift(config, tokens) == pytest.approx(calculate_shift(tokens, *(config[k] for k in keys if config)))
