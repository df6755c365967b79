"""The schedule of a request through a diffusers pipeline: handed on where it counts, refused where it would not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from omni_grpc.checkpoint.presets import shipped_presets
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import ImageInput, Inputs
from tests.adapter.conftest import GRADIENT
from tests.presets.published import QWEN_IMAGE_LIGHTNING

PRESETS = {preset.name: dataclasses.replace(preset, loras=()) for preset in shipped_presets()}
"""Without their adapters: what they set of the schedule alone."""


def by_preset(adapter, name, **asked):
    adapter.checkpoint = dataclasses.replace(adapter.checkpoint, presets=(PRESETS[name],))
    return adapter.run(preset=name, **asked)


def test_the_levels_of_a_preset_reach_the_schedule_which_shifts_them_by_size(load) -> None:
    adapter = load("flux2_dev")
    assert {"sigmas", "shift"} <= adapter.checkpoint.spec.takes
    ran = by_preset(adapter, "flux.2-dev-turbo", width=64, height=64, seeds=(3,))
    assert ran.request.steps == len(ran.progress) == 8
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(adapter.pipeline.scheduler.config)
    mu = compute_empirical_mu(image_seq_len=(64 // 16) ** 2, num_steps=8)
    scheduler.set_timesteps(sigmas=list(PRESETS["flux.2-dev-turbo"].sigmas), mu=mu)
    assert ran.prepared.levels.sigmas == tuple(scheduler.sigmas.tolist())
    assert [one.sigma for one in ran.progress] == scheduler.sigmas[:-1].tolist()
    usual = adapter.run(width=64, height=64, steps=8, seeds=(3,))
    assert usual.prepared.levels.sigmas != ran.prepared.levels.sigmas
    assert usual.files != ran.files


@pytest.mark.parametrize("steps", [4, 8])
def test_the_scheduler_of_a_preset_is_there_for_its_request_alone(steps, load) -> None:
    adapter = load("qwen_image_edit")
    picture = Inputs(images=(ImageInput(64, 64, 3, GRADIENT.tobytes()),))
    asked = {"inputs": picture, "width": 64, "height": 64, "seeds": (3,)}
    before = dict(adapter.pipeline.scheduler.config)
    usual = adapter.run(steps=steps, **asked)
    ran = by_preset(adapter, f"qwen-image-edit-lightning-{steps}", **asked)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(QWEN_IMAGE_LIGHTNING))
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist(), mu=np.log(3))
    assert ran.prepared.levels.sigmas == tuple(scheduler.sigmas.tolist())
    assert dict(adapter.pipeline.scheduler.config) == before
    again = adapter.run(steps=steps, **asked)
    assert again.files == usual.files != ran.files
    assert again.prepared.levels == usual.prepared.levels


@pytest.mark.parametrize("name", ["flux2_dev", "wan_t2v"])
def test_a_shift_stands_for_the_rule_of_the_scheduler(name, load, tiny) -> None:
    adapter = load(name)
    more = {"num_frames": 5} if name == "wan_t2v" else {}
    ran = adapter.run(width=64, height=64, steps=3, shift=7.0, seeds=(3,), **more)
    assert ran.prepared.levels.shift == 7.0
    scheduler = type(adapter.pipeline.scheduler).from_config(
        adapter.pipeline.scheduler.config, shift=7.0, flow_shift=7.0, use_dynamic_shifting=False, shift_terminal=None
    )
    if name == "wan_t2v":
        scheduler.set_timesteps(3)
    else:
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 3, 3).tolist())
    assert ran.prepared.levels.sigmas == tuple(scheduler.sigmas.tolist())
    assert [one.sigma for one in ran.progress] == scheduler.sigmas[:-1].tolist()


def test_levels_and_extras_of_that_name_are_not_both_taken(load) -> None:
    with pytest.raises(InvalidArgument, match=r"extra\.sigmas, sampling\.sigmas: are both set"):
        load("flux2_dev").run(width=64, height=64, sigmas=(1.0, 0.5), extra={"sigmas": [1.0, 0.5]})


@pytest.mark.parametrize("name", ["stable_diffusion_xl", "wan_t2v"])
def test_where_the_scheduler_would_not_take_them_levels_are_refused(name, load) -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.sigmas: cannot be used: \w+ takes no noise levels"):
        load(name).request(sigmas=(1.0, 0.5))


def test_a_scheduler_of_another_kind_has_no_shift(load) -> None:
    adapter = load("stable_diffusion_xl")
    with pytest.raises(
        InvalidArgument, match=r"sampling\.shift: cannot be used: StableDiffusionXLPipeline has no shift"
    ):
        adapter.request(shift=3.0)
    assert adapter.run(width=64, height=64, steps=2).prepared.levels.sigmas == ()
