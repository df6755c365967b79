"""Pictures of latents, against a matrix product in float64."""

from __future__ import annotations

import numpy as np
import torch

from omni_grpc.pipeline.preview import latent_preview, predict_x0
from omni_grpc.types.spec import LatentRgb

FACTORS = ((0.5, -0.2, 0.1), (0.0, 0.3, -0.4), (-0.1, 0.2, 0.6), (0.25, 0.0, -0.3))
BIAS = (0.1, -0.2, 0.3)
LATENTS = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0)) * 2


def bytes_of(unit: np.ndarray) -> np.ndarray:
    return np.round(np.clip(unit, 0, 1) * 255).astype(np.uint8)


def test_a_map_is_a_matrix_product() -> None:
    rgb = np.einsum("chw,cr->hwr", LATENTS.double().numpy(), np.array(FACTORS)) + np.array(BIAS)
    assert (np.abs(rgb) > 1).any()
    assert (np.abs(rgb) < 1).any()
    picture = latent_preview(LATENTS, LatentRgb(factors=FACTORS, bias=BIAS))
    assert picture.dtype == np.uint8
    assert picture.flags.c_contiguous
    np.testing.assert_array_equal(picture, bytes_of(rgb / 2 + 0.5))


def test_a_step_towards_a_picture_foresees_it() -> None:
    clean, noise = LATENTS, torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(1))
    before, after = ((1 - sigma) * clean + sigma * noise for sigma in (0.8, 0.6))
    torch.testing.assert_close(predict_x0(after, before, 0.8, 0.6), clean, rtol=0, atol=1e-5)
    assert predict_x0(after, before, 0.8, 0.0).equal(after)
    assert predict_x0(after, before, 0.6, 0.6).equal(after)


def test_a_map_without_bias_shows_zeros_as_grey() -> None:
    picture = latent_preview(torch.zeros(4, 2, 3), LatentRgb(factors=FACTORS))
    np.testing.assert_array_equal(picture, np.full((2, 3, 3), 128))


def test_without_a_map_three_groups_of_channels_are_stretched_to_what_can_be_seen() -> None:
    latents = LATENTS.double().numpy()
    groups = np.stack([latents[0] + latents[1], latents[2], latents[3]], -1)
    low, high = groups.min((0, 1)), groups.max((0, 1))
    picture = latent_preview(LATENTS, None)
    np.testing.assert_array_equal(picture, bytes_of((groups - low) / (high - low)))
    assert picture.min((0, 1)).tolist() == [0, 0, 0]
    assert picture.max((0, 1)).tolist() == [255, 255, 255]


def test_latents_that_are_all_alike_are_black_without_a_map() -> None:
    assert not latent_preview(torch.ones(3, 2, 2), None).any()


def test_a_pixel_that_is_no_number_is_black_and_leaves_the_others_alone() -> None:
    rgb = LatentRgb(factors=FACTORS, bias=BIAS)
    broken = LATENTS.clone()
    broken[:, 2, 3] = torch.nan
    expected = latent_preview(LATENTS, rgb).copy()
    expected[2, 3] = 0
    np.testing.assert_array_equal(latent_preview(broken, rgb), expected)


def test_a_group_that_is_no_number_is_black_without_a_map() -> None:
    broken = LATENTS.clone()
    broken[2, 2, 3] = torch.nan
    expected = latent_preview(LATENTS, None).copy()
    expected[..., 1] = 0
    np.testing.assert_array_equal(latent_preview(broken, None), expected)


def test_the_picture_of_bfloat16_is_that_of_its_values() -> None:
    rounded = LATENTS.bfloat16()
    rgb = LatentRgb(factors=FACTORS, bias=BIAS)
    np.testing.assert_array_equal(latent_preview(rounded, rgb), latent_preview(rounded.float(), rgb))
