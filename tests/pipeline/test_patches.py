"""Latents as tokens, against diffusers."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImagePipeline

from omni_grpc.pipeline.patches import Grid, pack


@pytest.mark.parametrize(("height", "width", "patch"), [(1, 1, 2), (2, 3, 2), (5, 1, 1), (3, 4, 3)])
def test_a_grid_undoes_pack(height: int, width: int, patch: int) -> None:
    latents = torch.randn(6, patch * height, patch * width)
    grid = Grid(height, width, patch)
    tokens = pack(latents, patch)
    assert tokens.shape == (grid.tokens, 6 * patch**2) == (height * width, 6 * patch**2)
    assert torch.equal(grid.image(tokens), latents)


def test_tokens_lie_row_by_row_and_hold_their_patch_channel_by_channel() -> None:
    picture = torch.arange(16).reshape(1, 4, 4)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert pack(picture, 2).tolist() == expected
    assert pack(torch.cat([picture, picture + 100]), 2)[1].tolist() == [2, 3, 6, 7, 102, 103, 106, 107]


def test_packed_latents_are_those_of_diffusers() -> None:
    latents = torch.randn(16, 6, 10)
    expected = QwenImagePipeline._pack_latents(latents[None], 1, 16, 6, 10)
    assert torch.equal(pack(latents, 2), expected[0])
