"""The schedule of one output, against diffusers' scheduler and pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HeliosScheduler, UniPCMultistepScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from omni_grpc.models.helios.helios_scheduler import SCHEDULERS
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.types.errors import CheckpointError

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
    schedule = Schedule(CONFIG, Levels(steps=steps, sigmas=sigmas(steps), mu=0.6), device="cpu")
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
    schedule = Schedule(CONFIG, Levels(steps=1, sigmas=[1.0], mu=0.6), device="cpu")
    assert schedule.sigmas == (1.0, 0.0)
    latents, velocity = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(schedule.step(latents, velocity, 0), latents - velocity)


def test_steps_are_taken_in_order() -> None:
    schedule = Schedule(CONFIG, Levels(steps=3, sigmas=sigmas(3), mu=0.6), device="cpu")
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="evaluation 1 was asked for, the next one is 0"):
        schedule.step(x, x, 1)
    schedule.step(x, x, 0)
    with pytest.raises(ValueError, match="evaluation 0 was asked for, the next one is 1"):
        schedule.step(x, x, 0)


def test_noise_of_a_stochastic_scheduler_comes_from_the_generator() -> None:
    config = CONFIG | {"stochastic_sampling": True}
    x = torch.zeros(4, 4)

    def once(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return Schedule(config, Levels(steps=2, sigmas=sigmas(2), mu=0.6), device="cpu").step(x, x, 0, generator)

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))


@pytest.mark.parametrize("kind", ["euler", "unipc"])
@pytest.mark.parametrize("shift", ["exponential", "linear"])
def test_both_kinds_of_the_helios_scheduler_are_those_of_diffusers(kind: str, shift: str) -> None:
    config = {"stages": 1, "scheduler_type": kind, "use_dynamic_shifting": True, "time_shift_type": shift}
    oracle, given = HeliosScheduler.from_config(config), np.linspace(0.999, 0.0, 5)[:-1]
    oracle.set_timesteps(4, sigmas=given, mu=0.8)
    levels = Levels(steps=4, sigmas=given.tolist(), mu=0.8)
    schedule = Schedule(config | {"_class_name": "HeliosScheduler"}, levels, device="cpu", own=SCHEDULERS)
    assert schedule.sigmas == tuple(oracle.sigmas.tolist())
    assert schedule.timesteps == tuple(oracle.timesteps.tolist())
    mine = theirs = torch.randn(3, 4)
    for index in range(4):
        velocity = torch.randn(3, 4)
        mine = schedule.step(mine, velocity, index)
        theirs = oracle.step(velocity, oracle.timesteps[index], theirs, return_dict=False)[0]
        assert torch.equal(mine, theirs)


def test_a_pyramid_of_sizes_is_no_schedule() -> None:
    with pytest.raises(CheckpointError, match="stages = 3 is not served yet"):
        Schedule({"_class_name": "HeliosScheduler"}, Levels(steps=2), device="cpu", own=SCHEDULERS)


def test_a_scheduler_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'PNDMScheduler' is not served yet"):
        Schedule({"_class_name": "PNDMScheduler"}, Levels(steps=2), device="cpu")
    with pytest.raises(CheckpointError, match="'HeliosScheduler' is not served yet"):
        Schedule({"_class_name": "HeliosScheduler"}, Levels(steps=2), device="cpu")


@pytest.mark.parametrize("tokens", [1, 256, 4096, 16384])
@pytest.mark.parametrize("config", [CONFIG, {}])
def test_dynamic_shift_is_that_of_diffusers(config: dict, tokens: int) -> None:
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    assert dynamic_shift(config, tokens) == pytest.approx(calculate_shift(tokens, *(config[k] for k in keys if config)))


def order_two(steps: int) -> Schedule:
    levels = Levels(steps=steps, sigmas=sigmas(steps), mu=0.6)
    return Schedule(CONFIG, levels, device="cpu", name="FlowMatchHeunDiscreteScheduler")


def test_a_step_of_heun_is_the_mean_of_the_slopes_at_its_two_ends() -> None:
    """https://arxiv.org/abs/2206.00364, algorithm 1, on Euler's levels; the last step has one evaluation."""
    schedule = order_two(4)
    euler = Schedule(CONFIG, Levels(steps=4, sigmas=sigmas(4), mu=0.6), device="cpu")
    assert schedule.sigmas == euler.sigmas
    assert (schedule.steps, schedule.evaluations) == (4, 7)
    assert [schedule.step_of(evaluation) for evaluation in range(8)] == [0, 0, 1, 1, 2, 2, 3, 4]
    levels = schedule.sigmas
    assert schedule.timesteps == pytest.approx([1000 * levels[n] for n in (0, 1, 1, 2, 2, 3, 3)])

    x = latents = torch.randn(3, 4)
    slopes = [torch.randn(3, 4) for _ in range(7)]
    for evaluation, slope in enumerate(slopes):
        latents = schedule.step(latents, slope, evaluation)
        step = evaluation // 2
        width = levels[step + 1] - levels[step]
        if evaluation % 2 == 0:
            torch.testing.assert_close(latents, x + width * slope)
        else:
            x = x + width * (slopes[evaluation - 1] + slope) / 2
            torch.testing.assert_close(latents, x)


def test_one_step_of_heun_is_one_of_euler() -> None:
    schedule = order_two(1)
    assert (schedule.steps, schedule.evaluations, schedule.sigmas) == (1, 1, (1.0, 0.0))
    latents, velocity = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(schedule.step(latents, velocity, 0), latents - velocity)


def test_unipc_steps_are_those_of_diffusers() -> None:
    config = {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
    }
    oracle = UniPCMultistepScheduler.from_config(config)
    oracle.set_timesteps(5)
    schedule = Schedule(config, Levels(steps=5), device="cpu")
    assert schedule.sigmas == tuple(oracle.sigmas.tolist())
    assert schedule.timesteps == tuple(oracle.timesteps.tolist())
    mine = theirs = torch.randn(3, 4)
    for index in range(5):
        velocity = torch.randn(3, 4)
        mine = schedule.step(mine, velocity, index, torch.Generator())
        theirs = oracle.step(velocity, oracle.timesteps[index], theirs, return_dict=False)[0]
        assert torch.equal(mine, theirs)
