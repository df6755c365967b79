"""Every random number of a request comes from its seeds, also where a pipeline passes no generator on."""

from __future__ import annotations

import inspect
import random

import diffusers
import numpy as np
import pytest
import torch
from diffusers import SchedulerMixin

from omni_grpc.adapter.randomness import Randomness
from omni_grpc.adapter.session import Session

from .conftest import equal

SMALL = {"width": 64, "height": 64, "steps": 4}
SCHEDULERS = sorted(
    name for name in dir(diffusers)
    if inspect.isclass(kind := getattr(diffusers, name, None)) and issubclass(kind, SchedulerMixin)
    and kind is not SchedulerMixin
)  # fmt: skip

NOT_OF_A_PROMPT = {
    "BlockRefinementScheduler": "of text",
    "DiscreteDDIMScheduler": "of text",
    "EntropyBoundScheduler": "of text",
    "RFD4ProteinaScheduler": "of the coordinates of atoms",
    "KarrasVeScheduler": "of a pipeline without a prompt",
    "RePaintScheduler": "of a pipeline without a prompt",
    "ScoreSdeVeScheduler": "has no step",
}
"""Schedulers that no served pipeline has."""

STOCHASTIC = {
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "DPMSolverSinglestepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "EDMDPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "FlowMatchEulerDiscreteScheduler": {"stochastic_sampling": True},
}
"""Schedulers that draw noise with this config alone."""

NEEDS = {"AmusedScheduler": {"mask_token_id": 9}, "VQDiffusionScheduler": {"num_vec_classes": 9}}

CASES = [(name, NEEDS.get(name, {})) for name in SCHEDULERS if name not in NOT_OF_A_PROMPT] + list(STOCHASTIC.items())


def predicted(sample):
    return torch.tanh(sample) * 0.3


def steps(scheduler, sample):
    """The latents after a few steps of a loop that passes no generator on."""
    name = type(scheduler).__name__
    if name == "AmusedScheduler":
        scheduler.set_timesteps(4, temperature=(2, 0))
        tokens = torch.full((len(sample), 16), 9)
        logits = torch.linspace(0, 1, 8).repeat(len(sample), 16, 1)
        for timestep in scheduler.timesteps:
            tokens = scheduler.step(logits, timestep, tokens).prev_sample
        return tokens
    if name == "VQDiffusionScheduler":
        scheduler.set_timesteps(4)
        tokens = torch.full((len(sample), 16), 8)
        logits = torch.log_softmax(torch.linspace(0, 1, 8).reshape(1, 8, 1).repeat(len(sample), 1, 16), 1)
        for timestep in scheduler.timesteps:
            tokens = scheduler.step(logits, timestep, tokens).prev_sample
        return tokens
    if name == "DDPMWuerstchenScheduler":
        scheduler.set_timesteps(4)  # its last timestep is where it ends
        for timestep in scheduler.timesteps[:-1]:
            sample = scheduler.step(predicted(sample), timestep.expand(len(sample)), sample).prev_sample
        return sample
    if name in ("HeliosScheduler", "HeliosDMDScheduler"):
        scheduler.set_timesteps(4, 0)
        sample = sample[:, :, None]
        for index, timestep in enumerate(scheduler.timesteps):
            more = {
                "cur_sampling_step": index, "dmd_noisy_tensor": sample, "dmd_sigmas": scheduler.sigmas,
                "dmd_timesteps": scheduler.timesteps, "all_timesteps": scheduler.timesteps,
            } if name == "HeliosDMDScheduler" else {}  # fmt: skip
            sample = scheduler.step(predicted(sample), timestep, sample, **more).prev_sample
        return sample
    if name == "CogVideoXDPMScheduler":
        scheduler.set_timesteps(4)
        before, earlier = None, None
        for timestep in scheduler.timesteps:
            moved = scheduler.step(predicted(sample), before, timestep, earlier, sample, return_dict=False)
            sample, before, earlier = moved[0], moved[1], timestep
        return sample
    if name == "SCMScheduler":
        scheduler.set_timesteps(2)
        for timestep in scheduler.timesteps[:-1]:
            sample = scheduler.step(predicted(sample), timestep, sample).prev_sample
        return sample
    scheduler.set_timesteps(4)
    if name == "PiflowScheduler":
        sample = sample.flatten(2)
    for timestep in scheduler.timesteps:
        prediction = predicted(sample)
        if name == "PiflowScheduler":
            prediction = prediction.repeat(1, 1, scheduler.config.n_grid)
        sample = scheduler.step(prediction, timestep, sample).prev_sample
    return sample


def run(name, config, seeds):
    scheduler = getattr(diffusers, name)(**config)
    noise = [torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    made = Session(
        lambda: steps(scheduler, torch.stack(noise)),
        [scheduler],
        loops=[],
        total=lambda s: len(s.timesteps),
        clean_up=lambda failed: None,
        randomness=Randomness(seeds),
    )
    made.start()
    return made.output(), made.shared_randomness


@pytest.mark.parametrize(("name", "config"), CASES)
def test_the_steps_of_every_scheduler_are_those_of_the_seeds(name, config):
    first, _ = run(name, config, (5,))
    torch.randn(3), np.random.rand(3), random.random()  # what others draw meanwhile
    again, _ = run(name, config, (5,))
    assert torch.equal(first, again)
    assert first.isfinite().all()
    batch, shared = run(name, config, (4, 5))
    # a row equals its solo run, or the reply says that it does not
    assert torch.equal(batch[1:], first) or shared


def test_noise_that_no_single_output_owns_is_known():
    shared = {name for name, config in CASES if run(name, config, (4, 5))[1]}
    assert shared == {"AmusedScheduler", "VQDiffusionScheduler"}


def test_what_is_drawn_from_the_process_is_the_requests_and_leaves_no_trace():
    def drawn(seeds):
        made = Session(
            lambda: (torch.randn(2).tolist(), np.random.rand(), random.random()),
            [],
            loops=[],
            total=lambda s: 0,
            clean_up=lambda failed: None,
            randomness=Randomness(seeds),
        )
        made.start()
        return made.output(), made.shared_randomness

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.randn(1), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first, shared = drawn((5,))
    assert shared
    assert (torch.randn(1), np.random.rand(), random.random()) == expected
    assert drawn((5,))[0] == first
    assert drawn((6,))[0] != first


@pytest.mark.parametrize(
    ("name", "scheduler", "config"),
    [
        ("flux", "FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
        ("stable_diffusion", "DPMSolverSDEScheduler", {}),
        ("stable_diffusion", "EulerAncestralDiscreteScheduler", {}),
    ],
)
def test_the_same_seed_gives_the_same_bytes_with_a_scheduler_that_adds_noise(name, scheduler, config, load):
    adapter = load(name)
    kind = getattr(diffusers, scheduler)
    adapter.pipeline.scheduler = kind.from_config(adapter.pipeline.scheduler.config, **config)
    adapter.runner._schedulers[:] = [adapter.pipeline.scheduler]
    one = adapter.run(**SMALL, seeds=(5,))
    torch.randn(7)
    assert adapter.run(**SMALL, seeds=(5,)).files == one.files
    assert adapter.run(**SMALL, seeds=(6,)).files != one.files
    several = adapter.run(**SMALL, seeds=(4, 5), num_outputs=2)
    # a batch rounds its products in another order
    assert np.abs(several.output[1] - one.output[0]).max() < 1e-4
    assert "RANDOMNESS_SHARED" not in several.warnings


def test_outputs_that_share_random_numbers_are_warned_about(load, monkeypatch):
    adapter = load("stable_diffusion")
    encode = type(adapter.pipeline).encode_prompt

    def noisy(self, *args, **kwargs):
        first, *rest = encode(self, *args, **kwargs)
        return first + 0.1 * torch.randn(1), *rest

    monkeypatch.setattr(type(adapter.pipeline), "encode_prompt", noisy)
    several = adapter.run(**SMALL, seeds=(4, 5), num_outputs=2)
    assert several.warnings["RANDOMNESS_SHARED"].field == "sampling.seeds"
    assert (
        "StableDiffusionPipeline drew random numbers for all outputs" in several.warnings["RANDOMNESS_SHARED"].message
    )
    one = adapter.run(**SMALL, seeds=(5,))
    assert one.warnings == {}
    assert equal(adapter.run(**SMALL, seeds=(5,)).output, one.output)
