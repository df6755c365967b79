"""Latents as tokens: p x p patches of channels, side by side in one token (FLUX, Qwen-Image and others)."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """How the tokens of one output lie in its picture: height x width tokens, each of patch x patch latent pixels."""

    height: int
    width: int
    patch: int

    @property
    def tokens(self) -> int:
        return self.height * self.width

    def image(self, tokens: Tensor) -> Tensor:
        """[height * width, C * patch * patch] -> [C, patch * height, patch * width]."""
        return unpack(tokens, self.height, self.width, self.patch)


def pack(latents: Tensor, patch: int) -> Tensor:
    """[C, patch * height, patch * width] -> [height * width, C * patch * patch], row by row of the image."""
    channels, height, width = latents.shape
    tiles = latents.reshape(channels, height // patch, patch, width // patch, patch)
    return tiles.permute(1, 3, 0, 2, 4).reshape(-1, channels * patch**2)


def unpack(tokens: Tensor, height: int, width: int, patch: int) -> Tensor:
    """The inverse of `pack`; height and width in tokens."""
    tiles = tokens.reshape(height, width, -1, patch, patch)
    return tiles.permute(2, 0, 3, 1, 4).reshape(-1, patch * height, patch * width)
