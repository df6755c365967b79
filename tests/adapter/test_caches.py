"""Step caches of diffusers: active where they are said to be, gone between requests, refused where they do not work."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.types.errors import ConfigError, InvalidArgument
from omni_grpc.types.request import GuidanceDraft

from .conftest import equal, refused

SMALL = {"width": 64, "height": 64, "steps": 6, "seeds": (1,)}
SHORT = {**SMALL, "num_frames": 5}
RATIOS = [1.0] * 6
WORKING = [
    ("flux", "first_block", {"threshold": 10.0}),
    ("flux", "taylorseer", {"cache_interval": 2, "disable_cache_before_step": 1, "taylor_factors_dtype": None}),
    ("flux", "mag", {"mag_ratios": RATIOS, "retention_ratio": 0.1, "threshold": 1.0}),
    ("flux", "pab", {"spatial_attention_timestep_skip_range": [0, 1000]}),
    ("wan_t2v", "first_block", {"threshold": 10.0}),
    ("wan_t2v", "mag", {"mag_ratios": RATIOS, "retention_ratio": 0.1, "threshold": 1.0}),
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
        ("wan_v2v", "mag", {"mag_ratios": RATIOS}, "mixes up the two passes"),
        ("wan_t2v", "taylorseer", {}, "finds no block"),
        ("flux", "sea", {}, "does not tell it the step"),
        ("flux", "text_kv", {}, "finds no block"),
        ("flux", "teacache", {}, "expected one of first_block"),
        ("flux", "first_block", {"treshold": 1}, "takes no treshold; it takes threshold"),
        ("flux", "mag", {}, "mag_ratios"),
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
