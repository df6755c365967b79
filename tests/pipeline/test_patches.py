"""Latents as tokens, against diffusers."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImagePipeline

from omni_grpc.pipeline.patches import Grid


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("height", "width", "patch"), [(1, 1, 2), (2, 3, 2), (5, 1, 1), (3, 4, 3)])
@pytest.mark.parametrize(("frames", "depth"), [(1, 1), (3, 1), (2, 2)])
def test_unpack_undoes_pack(height: int, width: int, patch: int, frames: int, depth: int, channels_last: bool) -> None:
    grid = Grid(height=height, width=width, patch=patch, frames=frames, depth=depth, channels_last=channels_last)
    latents = torch.randn(6, depth * frames, patch * height, patch * width)
    tokens = grid.pack(latents)
    assert tokens.shape == (grid.tokens, 6 * depth * patch**2) == (frames * height * width, 6 * depth * patch**2)
    assert torch.equal(grid.unpack(tokens), latents)


def test_tokens_lie_row_by_row_and_hold_their_patch_channel_by_channel() -> None:
    picture = torch.arange(16).reshape(1, 1, 4, 4)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    grid = Grid(height=2, width=2, patch=2)
    assert grid.pack(picture).tolist() == expected
    assert grid.pack(torch.cat([picture, picture + 100]))[1].tolist() == [2, 3, 6, 7, 102, 103, 106, 107]


def test_channels_last_holds_the_patch_pixel_by_pixel() -> None:
    picture = torch.arange(16).reshape(1, 1, 4, 4)
    grid = Grid(height=2, width=2, patch=2, channels_last=True)
    assert grid.pack(torch.cat([picture, picture + 100]))[1].tolist() == [2, 102, 3, 103, 6, 106, 7, 107]


def test_frames_come_one_after_the_other() -> None:
    video = torch.arange(8).reshape(1, 2, 2, 2)
    assert Grid(frames=2, height=1, width=1, patch=2).pack(video).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Grid(depth=2, height=1, width=1, patch=2).pack(video).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_packed_latents_are_those_of_diffusers() -> None:
    latents = torch.randn(16, 6, 10)
    expected = QwenImagePipeline._pack_latents(latents[None], 1, 16, 6, 10)
    assert torch.equal(Grid(height=3, width=5, patch=2).pack(latents[:, None]), expected[0])
