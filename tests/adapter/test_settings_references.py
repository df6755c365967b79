"""Every setting that changes what a pipeline computes gives the bits of plain diffusers with the same setting.

What has no case here: offload, which moves weights and is compared in test_settings.py; guiders, in test_guidance.py;
the sizes of `mag` for two experts, in test_caches.py; and what needs an accelerator, in benchmarks/gpu_adapter.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline

from omni_grpc.adapter.caches import KINDS
from omni_grpc.config import AdapterConfig

from .conftest import equal, same_memory

SMALL = {"width": 64, "height": 64}
SHORT = {**SMALL, "num_frames": 5}
STEPS, SEED = 6, 3
RATIOS = [1.0, 0.99, 1.01, 1.0, 0.98, 1.0]


@dataclasses.dataclass(frozen=True)
class Case:
    """settings: of the adapter. load: the same for from_pretrained. change: what is done with the pipeline by hand.
    differs: whether the output is another one than without.
    """

    name: str
    settings: Mapping[str, Any]
    asked: Mapping[str, Any] = dataclasses.field(default_factory=lambda: SMALL)
    load: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    change: Callable[[Any], None] = lambda pipeline: None
    differs: bool = True


def cached(name: str, kind: str, asked: Mapping[str, Any] = SMALL, **config: Any) -> Case:
    def change(pipeline: Any) -> None:
        values = {**KINDS[kind].presets, **config}
        made = getattr(diffusers, KINDS[kind].config)
        if "current_timestep_callback" in {field.name for field in dataclasses.fields(made)}:
            values["current_timestep_callback"] = lambda: pipeline.current_timestep
        if kind == "mag_cache":
            values["num_inference_steps"] = STEPS
        for field, value in values.items():
            values[field] = tuple(value) if "range" in field and isinstance(value, list) else value
        for denoiser in (pipeline.transformer, getattr(pipeline, "transformer_2", None)):
            if denoiser is not None:
                denoiser.enable_cache(made(**values))

    return Case(name, {"cache_backend": kind, "cache_config": config}, asked, change=change)


def shifted(pipeline: Any) -> None:
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, flow_shift=8.0)


def tiled(pipeline: Any) -> None:
    pipeline.vae.enable_slicing()
    pipeline.vae.enable_tiling()


WHOLE = [0, 1000]
CASES: Mapping[str, Case] = {
    "first_block": cached("flux", "first_block", threshold=10.0),
    "first_block, video": cached("wan_t2v", "first_block", SHORT, threshold=10.0),
    "first_block, guided": cached("qwen_image", "first_block", threshold=10.0),
    "taylorseer": cached(
        "flux", "taylorseer", cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=None
    ),
    "mag": cached("flux", "mag_cache", mag_ratios=RATIOS, retention_ratio=0.1, threshold=1.0),
    "mag, guided": cached("wan_single", "mag_cache", SHORT, mag_ratios=RATIOS, retention_ratio=0.1, threshold=1.0),
    "pab": cached("flux", "pab", spatial_attention_timestep_skip_range=WHOLE),
    "faster": cached(
        "flux", "faster", spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=WHOLE
    ),
    "sea": cached("wan_single", "sea_cache", SHORT, threshold=10.0),
    "sea, two experts": cached("wan_t2v", "sea_cache", SHORT, threshold=10.0),
    "sea, omni": cached("cosmos3", "sea_cache", SHORT, threshold=10.0),
    "boundary ratio": Case("wan_t2v", {"boundary_ratio": 0.3}, SHORT, load={"boundary_ratio": 0.3}),
    "flow shift": Case("wan_t2v", {"flow_shift": 8.0}, SHORT, change=shifted),
    "VAE in parts": Case(
        "flux", {"vae_use_slicing": True, "vae_use_tiling": True}, {"width": 128, "height": 96}, change=tiled
    ),
    "dtype": Case("flux", {"diffusers_load_kwargs": {"dtype": "bfloat16"}}, load={"dtype": torch.bfloat16}),
    "attention": Case(
        "flux",
        {"diffusion_attention_backend": "TORCH_SDPA"},
        change=lambda pipeline: pipeline.transformer.set_attention_backend("native"),
        differs=False,
    ),
    "arguments": Case("flux", {"diffusers_call_kwargs": {"guidance_scale": 1.5}}),
}


@pytest.fixture
def direct(tiny):
    """A call of plain diffusers after a change to its pipeline."""

    def call(case: Case, like: Any, **arguments: Any) -> Any:
        folder = tiny(case.name)
        pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **case.load)
        pipeline.set_progress_bar_config(disable=True)
        same_memory(pipeline, like.pipeline)
        case.change(pipeline)
        return pipeline(
            prompt="a red cat",
            num_inference_steps=STEPS,
            generator=torch.Generator("cpu").manual_seed(SEED),
            output_type="np",
            **arguments,
        )[0]

    return call


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_setting_gives_what_it_gives_in_diffusers(case, load, direct):
    adapter = load(case.name, **case.settings)
    ran = adapter.run(**case.asked, steps=STEPS, seeds=(SEED,))
    arguments = {**case.asked, **case.settings.get("diffusers_call_kwargs", {})}
    assert equal(ran.output, direct(case, adapter, **arguments))
    plainly = direct(dataclasses.replace(case, load={}, change=lambda pipeline: None), load(case.name), **case.asked)
    assert equal(ran.output, plainly) != case.differs
    # and it is no accident of the first request
    assert equal(adapter.run(**case.asked, steps=STEPS, seeds=(SEED,)).output, ran.output)


def test_each_cache_and_each_setting_has_a_case():
    settings = {name for case in CASES.values() for name in case.settings}
    caches = {case.settings.get("cache_backend") for case in CASES.values()} - {None}
    # for Nucleus alone, of which there is no tiny one
    assert caches == KINDS.keys() - {"text_kv"}
    elsewhere = {"allow_attention_fallback", "enable_cpu_offload"}
    assert {field.name for field in dataclasses.fields(AdapterConfig)} <= settings | elsewhere
