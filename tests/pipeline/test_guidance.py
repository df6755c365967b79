"""Guidance against its formulas, written with numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from omni_grpc.pipeline.guidance import combine
from omni_grpc.types.request import Guidance, GuidanceNorm

COND, UNCOND = (torch.randn(12, 2, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
SCALE = 1.5
GUIDED = (UNCOND + SCALE * (COND - UNCOND)).double().numpy()
RATIO = np.linalg.norm(COND.double().numpy(), axis=1, keepdims=True) / np.linalg.norm(GUIDED, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (GuidanceNorm.NONE, GUIDED),
        (GuidanceNorm.RENORM, GUIDED * RATIO),
        (GuidanceNorm.RENORM_CLIPPED, GUIDED * np.minimum(1, RATIO)),
    ],
)
def test_two_branches(norm: GuidanceNorm, expected: np.ndarray) -> None:
    out = combine({"cond": COND, "uncond": UNCOND}, Guidance(true_cfg_scale=SCALE, norm=norm))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5)


def test_the_clipped_norm_shortens_some_tokens_and_lengthens_none() -> None:
    assert (RATIO > 1).any()
    assert (RATIO < 1).any()
    out = combine(
        {"cond": COND, "uncond": UNCOND}, Guidance(true_cfg_scale=SCALE, norm=GuidanceNorm.RENORM_CLIPPED)
    ).numpy()
    assert (np.linalg.norm(out, axis=1) <= np.linalg.norm(GUIDED, axis=1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("share", [0.25, 0.7, 1.0])
def test_rescale_is_equations_15_and_16_of_its_paper(share: float) -> None:
    """https://arxiv.org/abs/2305.08891: rescaled = x * std(pos) / std(x), then share * rescaled + (1 - share) * x."""
    rescaled = GUIDED * (COND.double().numpy().std() / GUIDED.std())
    out = combine({"cond": COND, "uncond": UNCOND}, Guidance(true_cfg_scale=SCALE, rescale=share))
    np.testing.assert_allclose(out.numpy(), share * rescaled + (1 - share) * GUIDED, rtol=1e-5, atol=1e-6)
    theirs = rescale_noise_cfg(torch.from_numpy(GUIDED)[None], COND.double()[None], guidance_rescale=share)
    np.testing.assert_allclose(out.numpy(), theirs[0].numpy(), rtol=1e-5, atol=1e-6)


def test_the_norm_comes_after_the_rescale() -> None:
    """So that RENORM, which sets every length, leaves nothing of it, as `resolve` tells whoever asks for both."""
    branches = {"cond": COND, "uncond": UNCOND}
    both, norm = (
        combine(branches, Guidance(true_cfg_scale=SCALE, rescale=share, norm=GuidanceNorm.RENORM))
        for share in (0.7, 0.0)
    )
    torch.testing.assert_close(both, norm)


def test_one_branch_is_the_prediction_itself() -> None:
    assert combine({"cond": COND}, Guidance(true_cfg_scale=SCALE, norm=GuidanceNorm.RENORM)) is COND


@pytest.mark.parametrize("norm", GuidanceNorm)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_guided_to_zero_stays_finite(norm: GuidanceNorm, dtype: torch.dtype) -> None:
    cond, uncond = torch.full((2, 4), 8.0, dtype=dtype), torch.full((2, 4), 16.0, dtype=dtype)
    out = combine({"cond": cond, "uncond": uncond}, Guidance(true_cfg_scale=2.0, norm=norm))
    assert torch.equal(out, torch.zeros_like(out))
