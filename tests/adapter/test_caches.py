"""Step caches of diffusers: active where they are said to be, gone between requests, refused where they do not work."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, MagCacheConfig, WanPipeline

from omni_grpc.types.errors import ConfigError, InvalidArgument
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import GuidanceDraft, Task

from .conftest import GRADIENT, equal, refused, same_memory

PICTURE = ImageInput(64, 64, 3, GRADIENT.tobytes())

SMALL = {"width": 64, "height": 64, "steps": 6, "seeds": (1,)}
SHORT = {**SMALL, "num_frames": 5}
RATIOS = [1.0] * 6
WORKING = [
    ("flux", "first_block", {"threshold": 10.0}),
    ("flux", "taylorseer", {"cache_interval": 2, "disable_cache_before_step": 1, "taylor_factors_dtype": None}),
    ("flux", "mag_cache", {"mag_ratios": RATIOS, "retention_ratio": 0.1, "threshold": 1.0}),
    ("flux", "pab", {"spatial_attention_timestep_skip_range": [0, 1000]}),
    ("wan_t2v", "first_block", {"threshold": 10.0}),
    ("wan_t2v", "mag_cache", {"mag_ratios": RATIOS, "retention_ratio": 0.1, "threshold": 1.0}),
    ("qwen_image", "first_block", {"threshold": 10.0}),
]


def linear_calls(adapter):
    calls = []
    for module in adapter.pipeline.transformer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("name", "cache", "config"), WORKING)
def test_a_cache_skips_work_and_forgets_between_requests(name, cache, config, load):
    asked = SHORT if name == "wan_t2v" else SMALL
    without, adapter = load(name), load(name, cache_backend=cache, cache_config=config)
    full, cached = linear_calls(without), linear_calls(adapter)
    without.run(**asked)
    first = adapter.run(**asked)
    assert 0 < len(cached) < len(full)
    # stopped in the middle, with another size and prompt
    stopped = adapter.request(**{**asked, "width": 96, "prompt": "a blue robot", "steps": 5})
    adapter.runner.prepare(stopped)
    for _ in range(3):
        adapter.runner.step((stopped.id,))
    adapter.runner.drop((stopped.id,))
    assert equal(adapter.run(**asked).output, first.output)


@pytest.mark.parametrize(
    ("name", "cache", "config", "message"),
    [
        ("z_image", "first_block", {}, "ZImageTransformer2DModel supports no cache"),
        ("stable_diffusion", "first_block", {}, "UNet2DConditionModel supports no cache"),
        ("wan_t2v", "pab", {}, "mixes up the two passes"),
        ("wan_v2v", "pab", {}, "mixes up the two passes"),
        ("wan_v2v", "mag_cache", {"mag_ratios": RATIOS}, "mixes up the two passes"),
        ("hunyuan_video15", "pab", {}, "mixes up the two passes"),
        ("hunyuan_video15", "faster", {}, "mixes up the two passes"),
        ("wan_t2v", "taylorseer", {}, "finds no block"),
        ("flux", "sea_cache", {}, "does not tell it the step"),
        ("ovis_image", "first_block", {}, "does not work on OvisImageTransformer2DModel: Model class"),
        ("hunyuan_video15", "mag_cache", {"mag_ratios": RATIOS}, "does not work on HunyuanVideo15Transformer3DModel"),
        ("hunyuan_video15", "first_block", {}, "does not work on HunyuanVideo15Transformer3DModel"),
        ("flux", "text_kv", {}, "finds no block"),
        ("flux", "teacache", {}, "expected one of first_block"),
        ("flux", "first_block", {"treshold": 1}, "takes no treshold; it takes threshold"),
        ("flux", "mag_cache", {}, "mag_ratios"),
        ("flux", "faster", {"is_guidance_distilled": False}, "is_guidance_distilled"),
    ],
)
def test_a_cache_that_does_not_work_is_refused_by_name(name, cache, config, message, load):
    with pytest.raises(ConfigError, match=message) as caught:
        load(name, cache_backend=cache, cache_config=config)
    assert refused(caught.value) <= {"cache_backend", "cache_config"}


def test_a_request_that_the_cache_would_spoil_is_refused(load):
    adapter = load("flux", cache_backend="pab", cache_config={})
    with pytest.raises(InvalidArgument, match="leave the negative prompt unset"):
        adapter.run(**SMALL, negative_prompt="blurry", guidance=GuidanceDraft(true_cfg_scale=2.0))
    assert adapter.run(**SMALL).files


def test_a_second_prediction_that_the_request_does_not_name_is_refused_too(load):
    asked = {**SMALL, "guidance": GuidanceDraft(true_cfg_scale=2.0)}
    embeds = torch.zeros(1, 512, 64)
    adapter = load("flux", cache_backend="pab", cache_config={})
    with pytest.raises(InvalidArgument, match="mixes up the two passes") as caught:
        adapter.run(**asked, extra={"negative_prompt_embeds": embeds})
    assert refused(caught.value) == {"extra.negative_prompt_embeds"}
    settings = {"diffusers_call_kwargs": {"negative_prompt": "blurry", "true_cfg_scale": 2.0}}
    with pytest.raises(InvalidArgument, match="mixes up the two passes"):
        load("flux", cache_backend="pab", cache_config={}, **settings).run(**SMALL)


@pytest.mark.parametrize(
    ("name", "asked", "steps"),
    [
        ("flux", {}, 6),
        ("flux", {"extra": {"sigmas": [1.0, 0.7, 0.4]}}, 3),
        ("flux", {"task": Task.IMAGE_TO_IMAGE, "inputs": Inputs(images=(PICTURE,)), "strength": 0.5}, 3),
        ("wan_single", {"num_frames": 5, "negative_prompt": "static"}, 11),
    ],
)
def test_a_cache_is_sized_by_the_steps_that_run(name, asked, steps, load):
    config = {"mag_ratios": RATIOS, "retention_ratio": 0.1, "threshold": 1.0}
    adapter = load(name, cache_backend="mag_cache", cache_config=config)
    second_order = name == "wan_single"
    if second_order:
        adapter.pipeline.scheduler = FlowMatchHeunDiscreteScheduler()
        adapter.runner._schedulers[:] = [adapter.pipeline.scheduler]
    ran = adapter.run(**{**SMALL, **asked})
    assert len(ran.progress) == steps
    (sized,) = adapter.runner._cache._configs
    assert (sized.num_inference_steps, len(sized.mag_ratios)) == (steps, steps)
    again = {} if "task" in asked or "extra" in asked else asked
    adapter.run(**{**SMALL, **again, "steps": 4})
    assert sized.num_inference_steps == (7 if second_order else 4)


def calls_of(denoiser, passes):
    """How often each pass of an expert is asked for: its steps."""
    counted = dict.fromkeys(passes, 0)

    def count(module, *_):
        leader = module.blocks[0]._diffusers_hook.hooks["mag_cache_leader_block_hook"]
        counted[leader.state_manager._context.name] += 1

    denoiser.register_forward_pre_hook(count)
    return counted


@pytest.mark.parametrize(
    ("name", "boundary", "asked"),
    [
        ("wan_t2v", None, {"steps": 8, "negative_prompt": "static"}),
        ("wan_t2v", 0.5, {"steps": 7}),
        ("wan_t2v", 0.999, {"steps": 6}),
        ("wan_i2v", None, {"steps": 9, "task": Task.IMAGE_TO_VIDEO, "inputs": Inputs(first_frame=PICTURE)}),
    ],
)
def test_a_cache_is_sized_for_each_expert_by_the_steps_that_it_takes(name, boundary, asked, load):
    config = {"mag_ratios": RATIOS, "retention_ratio": 0.1, "threshold": 1.0}
    settings = {} if boundary is None else {"boundary_ratio": boundary}
    adapter = load(name, cache_backend="mag_cache", cache_config=config, **settings)
    experts = (adapter.pipeline.transformer, adapter.pipeline.transformer_2)
    counted = [calls_of(expert, ("cond", "uncond")) for expert in experts]
    adapter.run(**{**SHORT, **asked})
    taken = [calls["cond"] for calls in counted]
    assert sum(taken) == asked["steps"]
    assert taken[1] > 0
    for sized, steps in zip(adapter.runner._cache._configs, taken, strict=True):
        if steps:
            assert (sized.num_inference_steps, len(sized.mag_ratios)) == (steps, steps)
    assert min(taken) < asked["steps"]


def test_experts_have_ratios_of_their_own_and_give_what_diffusers_gives(load, tiny):
    """Each expert as diffusers has it with a config of its own; ratios that are shared are stretched over its steps."""
    high, low, rest = [1.0, 0.9, 1.1], [1.0, 1.02, 0.97, 1.0], {"retention_ratio": 0.1, "threshold": 0.3}
    asked = {**SHORT, "steps": 8, "negative_prompt": "static", "seeds": (3,)}
    for ratios in ([high, low], high):
        adapter = load("wan_t2v", cache_backend="mag_cache", cache_config={"mag_ratios": ratios, **rest})
        ran = adapter.run(**asked)
        pipeline = WanPipeline.from_pretrained(tiny("wan_t2v"), local_files_only=True)
        same_memory(pipeline, adapter.pipeline)
        pipeline.set_progress_bar_config(disable=True)
        experts = (pipeline.transformer, pipeline.transformer_2)
        sizes = [config.num_inference_steps for config in adapter.runner._cache._configs]
        assert sum(sizes) == 8
        for number, (expert, steps) in enumerate(zip(experts, sizes, strict=True)):
            own = ratios[number] if ratios is not high else high
            expert.enable_cache(MagCacheConfig(mag_ratios=own, num_inference_steps=steps, **rest))
        direct = pipeline(
            "a red cat",
            negative_prompt="static",
            num_inference_steps=8,
            num_frames=5,
            width=64,
            height=64,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
        )[0]
        assert equal(ran.output, direct)
    usual = load("wan_t2v").run(**asked)
    assert not equal(ran.output, usual.output), "the cache skipped nothing"
    with pytest.raises(ConfigError, match="a list for each; there are 2, got 3") as caught:
        load("wan_t2v", cache_backend="mag_cache", cache_config={"mag_ratios": [high, low, low]})
    assert refused(caught.value) == {"cache_config"}


def test_calibration_prints_the_ratios_of_each_expert(load, capsys):
    adapter = load("wan_t2v", cache_backend="mag_cache", cache_config={"calibrate": True})
    adapter.run(**{**SHORT, "steps": 8})
    sizes = [config.num_inference_steps for config in adapter.runner._cache._configs]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    assert sum(sizes) == 8
    # one for each pass of each expert, in the order in which they end
    lengths = [line.count(",") + 1 for line in printed]
    assert sorted(set(lengths)) == sorted(set(sizes))
    assert sum(lengths) % 8 == 0
