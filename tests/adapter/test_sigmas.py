"""Noise levels of a request through a diffusers pipeline: handed on where they count, refused where they would not."""

from __future__ import annotations

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from omni_grpc.types.errors import InvalidArgument

TURBO = (1.0, 0.6509, 0.4374, 0.2932)


def test_levels_reach_the_schedule_which_shifts_them_by_size(load) -> None:
    adapter = load("flux2_dev")
    assert "sigmas" in adapter.checkpoint.spec.takes
    ran = adapter.run(width=64, height=64, sigmas=TURBO, seeds=(3,))
    assert ran.request.steps == len(ran.progress) == 4
    tokens = (64 // 16) ** 2
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(adapter.pipeline.scheduler.config)
    scheduler.set_timesteps(sigmas=list(TURBO), mu=compute_empirical_mu(image_seq_len=tokens, num_steps=4))
    assert [one.sigma for one in ran.progress] == pytest.approx(scheduler.sigmas[:-1].tolist())
    usual = adapter.run(width=64, height=64, steps=4, seeds=(3,))
    assert [one.sigma for one in usual.progress] != [one.sigma for one in ran.progress]
    assert usual.files != ran.files


def test_levels_and_extras_of_that_name_are_not_both_taken(load) -> None:
    adapter = load("flux2_dev")
    with pytest.raises(InvalidArgument, match=r"extra\.sigmas, sampling\.sigmas: are both set"):
        adapter.run(width=64, height=64, sigmas=TURBO, extra={"sigmas": list(TURBO)})


@pytest.mark.parametrize("name", ["stable_diffusion_xl", "wan_t2v"])
def test_where_the_scheduler_would_not_take_them_levels_are_refused(name, load) -> None:
    adapter = load(name)
    with pytest.raises(
        InvalidArgument, match=r"sampling\.sigmas: cannot be used: \w+ takes no noise levels"
    ):
        adapter.request(sigmas=(1.0, 0.5))


def test_a_shift_is_refused_with_the_setting_that_there_is(load) -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.shift: cannot be used: .* --flow-shift sets it"):
        load("flux2_dev").request(shift=3.0)
