"""The noise levels of each preset that comes with the models, against diffusers' scheduler as the adapter's authors set
it up; and the levels and the shift of requests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from omni_grpc.checkpoint.presets import shipped_presets
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.pipeline.schedule import Schedule
from omni_grpc.resolve.request import resolve_request
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter
from omni_grpc.types.preset import Preset
from omni_grpc.types.request import Draft, Request
from tests.models.cases import ENTRIES, ask
from tests.models.cases.wan import ask as ask_video
from tests.models.cases.wan import shown
from tests.models.model import NAME, Model
from tests.presets.published import FLUX_DEV, QWEN_IMAGE, QWEN_IMAGE_LIGHTNING, WAN, WAN_LIGHTNING

PRESETS = {preset.name: preset for preset in shipped_presets()}
QUARTERS = [1.0, 0.75, 0.5, 0.25]
QWEN, FLUX, T2V, I2V = "QwenImagePipeline", "FluxPipeline", "WanPipeline", "WanImageToVideoPipeline"

CASES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], list[float]]] = {
    "qwen-image-lightning-4": (QWEN, QWEN_IMAGE, QWEN_IMAGE_LIGHTNING, np.linspace(1, 1 / 4, 4).tolist()),
    "qwen-image-lightning-8": (QWEN, QWEN_IMAGE, QWEN_IMAGE_LIGHTNING, np.linspace(1, 1 / 8, 8).tolist()),
    "wan2.2-t2v-lightning-4": (T2V, WAN, WAN_LIGHTNING, QUARTERS),
    "wan2.2-i2v-lightning-4": (I2V, WAN, WAN_LIGHTNING, QUARTERS),
    "wan2.1-t2v-lightx2v-4": (T2V, WAN, WAN_LIGHTNING, QUARTERS),
    "hyper-flux.1-dev-8": (FLUX, FLUX_DEV, FLUX_DEV, np.linspace(1, 1 / 8, 8).tolist()),
    "hyper-flux.1-dev-16": (FLUX, FLUX_DEV, FLUX_DEV, np.linspace(1, 1 / 16, 16).tolist()),
    "flux.1-turbo-alpha": (FLUX, FLUX_DEV, FLUX_DEV, np.linspace(1, 1 / 8, 8).tolist()),
}
"""Preset -> the model it is tried on, that model's scheduler, the adapter's, and its levels before the shift."""
THROUGH_DIFFUSERS = {"flux.2-dev-turbo", "qwen-image-edit-lightning-4", "qwen-image-edit-lightning-8"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Model]:
    """A tiny model by its entry, under the scheduler config of a real one."""

    @functools.cache
    def folder(entry: str) -> Path:
        return ENTRIES[entry].build(tmp_path_factory.mktemp("presets") / "checkpoint")

    @functools.cache
    def load(entry: str, config: str) -> Model:
        checkpoint = open_checkpoint(folder(entry), name=NAME)
        configs = {**checkpoint.configs, "scheduler": {"QWEN": QWEN_IMAGE, "FLUX": FLUX_DEV, "WAN": WAN}[config]}
        return Model(ENTRIES[entry], folder(entry), checkpoint=dataclasses.replace(checkpoint, configs=configs))

    return load


def config_name(config: Mapping[str, Any]) -> str:
    return {id(QWEN_IMAGE): "QWEN", id(FLUX_DEV): "FLUX", id(WAN): "WAN"}[id(config)]


def loaded(preset: Preset) -> WorkerFindings:
    """As if the preset's adapters were there."""
    return WorkerFindings(
        loras=tuple(
            Adapter(
                id=one.lora.lora_id, file="x", sha256="", format="peft", rank=4, size_bytes=1,
                applied={one.lora.target or "transformer": 1},
            )
            for one in preset.loras
        )
    )  # fmt: skip


def asked(model: Model, preset: Preset | None, draft: Draft) -> Request:
    if preset is not None:
        checkpoint = dataclasses.replace(model.checkpoint, presets=(preset,))
        model_facts = dataclasses.replace(model.facts, checkpoint=checkpoint, found=loaded(preset))
        return resolve_request(dataclasses.replace(draft, preset=preset.name), model_facts, id="job").request
    return model.request(draft)


def schedule(model: Model, request: Request) -> tuple[Schedule, int]:
    """Ours, and the number of image tokens that it is for."""
    grid = model.pipeline.grid(request.width, request.height, request.num_frames)
    return model.pipeline.schedule(request, grid), grid.tokens


def theirs(config: Mapping[str, Any], sigmas: list[float], tokens: int) -> torch.Tensor:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(dict(config))
    ends = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    shift = calculate_shift(tokens, *(config[name] for name in ends)) if config["use_dynamic_shifting"] else None
    scheduler.set_timesteps(sigmas=sigmas, mu=shift)
    return scheduler.sigmas


def draft_of(entry: str, **more: Any) -> Draft:
    if entry == I2V:
        return dataclasses.replace(ask_video(64, 64, 5, **shown()), steps=None, **more)
    ask_for = ask_video if entry == T2V else ask
    return dataclasses.replace(ask_for(64, 96), steps=None, **more)


def test_every_preset_is_compared() -> None:
    """Those of pipelines that run through diffusers are in tests/adapter."""
    assert CASES.keys() | THROUGH_DIFFUSERS == PRESETS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_levels_of_a_preset_are_those_of_its_authors(name: str, models: Callable[[str, str], Model]) -> None:
    entry, config, published, sigmas = CASES[name]
    model = models(entry, config_name(config))
    request = asked(model, PRESETS[name], draft_of(entry))
    made, tokens = schedule(model, request)
    assert made.sigmas == tuple(theirs(published, sigmas, tokens).tolist())
    assert made.name == "FlowMatchEulerDiscreteScheduler"
    assert (request.steps, request.preset) == (len(sigmas), name)
    if not name.startswith(("hyper", "flux")):
        usual, _ = schedule(model, asked(model, None, dataclasses.replace(draft_of(entry), steps=len(sigmas))))
        assert usual.sigmas != made.sigmas, "and not what the model does without it"


def test_a_wan_preset_divides_its_steps_between_the_experts_as_its_boundary_says(
    models: Callable[[str, str], Model],
) -> None:
    model = models(T2V, "WAN")
    made, _ = schedule(model, asked(model, PRESETS["wan2.2-t2v-lightning-4"], draft_of(T2V)))
    assert made.timesteps == pytest.approx((1000, 937.5, 833.3333, 625))
    assert [timestep >= 875 for timestep in made.timesteps] == [True, True, False, False]


@pytest.mark.parametrize(("entry", "config"), [(QWEN, "QWEN"), (FLUX, "FLUX")])
def test_the_shift_of_a_request_stands_for_the_whole_rule(
    entry: str, config: str, models: Callable[[str, str], Model]
) -> None:
    model = models(entry, config)
    made, tokens = schedule(model, asked(model, None, dataclasses.replace(draft_of(entry, shift=2.5), steps=5)))
    constant = {**FLUX_DEV, "use_dynamic_shifting": False, "shift": 2.5}
    assert made.sigmas == tuple(theirs(constant, np.linspace(1, 1 / 5, 5).tolist(), tokens).tolist())
    assert made.shift == 2.5


def test_with_a_shift_of_one_the_levels_of_a_request_are_those_that_are_visited(
    models: Callable[[str, str], Model],
) -> None:
    model, sigmas = models(QWEN, "QWEN"), (1.0, 0.6509, 0.2, 0.00031)
    request = asked(model, None, draft_of(QWEN, sigmas=sigmas, shift=1.0))
    made, _ = schedule(model, request)
    assert made.sigmas == pytest.approx((*sigmas, 0.0), rel=1e-6)
    assert request.steps == 4
    one, _ = schedule(model, asked(model, None, draft_of(QWEN, sigmas=(0.8,))))
    assert one.steps == 1


def test_unshifted_levels_of_a_request_are_shifted_by_size(models: Callable[[str, str], Model]) -> None:
    model, sigmas = models(FLUX, "FLUX"), [1.0, 0.6509, 0.4374, 0.0495]
    for size in (64, 128):
        draft = dataclasses.replace(draft_of(FLUX, sigmas=tuple(sigmas)), width=size, height=size)
        made, tokens = schedule(model, asked(model, None, draft))
        assert made.sigmas == tuple(theirs(FLUX_DEV, sigmas, tokens).tolist())
        ends = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        assert made.shift == pytest.approx(np.exp(calculate_shift(tokens, *(FLUX_DEV[name] for name in ends))))


def test_unipc_takes_levels_and_shift_by_its_own_names(models: Callable[[str, str], Model]) -> None:
    model = models(T2V, "WAN")
    made, _ = schedule(model, asked(model, None, draft_of(T2V, sigmas=(0.99, 0.5), shift=7.0)))
    scheduler = diffusers.UniPCMultistepScheduler.from_config({**WAN, "flow_shift": 7.0})
    scheduler.set_timesteps(2, sigmas=np.array([0.99, 0.5]))
    assert made.sigmas == tuple(scheduler.sigmas.tolist())
    assert (made.name, made.shift) == ("UniPCMultistepScheduler", 7.0)
    by_default, _ = schedule(model, asked(model, None, dataclasses.replace(draft_of(T2V), steps=2)))
    assert by_default.shift == 3.0


def test_heun_goes_through_the_levels_of_a_request(models: Callable[[str, str], Model]) -> None:
    model = models(FLUX, "FLUX")
    draft = draft_of(FLUX, sigmas=(1.0, 0.5), shift=1.0, scheduler="FlowMatchHeunDiscreteScheduler")
    made, _ = schedule(model, asked(model, None, draft))
    assert (made.sigmas, made.evaluations) == ((1.0, 0.5, 0.0), 3)
