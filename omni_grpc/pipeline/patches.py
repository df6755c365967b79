"""Grid: packs latents into tokens (patchify), and unpacks them."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The layout of the tokens of one output: frames x height x width tokens, frame by frame and row by row.

    A token is `depth` frames of `patch` x `patch` latent pixels. Its values are ordered channel first, or
    pixel first where `channels_last`.
    """

    height: int
    width: int
    patch: int = 1
    frames: int = 1
    depth: int = 1
    channels_last: bool = False

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    def latents_shape(self, channels: int) -> tuple[int, int, int, int]:
        """The shape of the latents that are packed: [channels, frames, height, width] in latent pixels."""
        return channels, self.depth * self.frames, self.patch * self.height, self.patch * self.width

    def pack(self, latents: Tensor) -> Tensor:
        """[C, depth * frames, patch * height, patch * width] -> [tokens, C * depth * patch * patch]."""
        channels, p = latents.shape[0], self.patch
        tiles = latents.reshape(channels, self.frames, self.depth, self.height, p, self.width, p)
        order = (1, 3, 5, 2, 4, 6, 0) if self.channels_last else (1, 3, 5, 0, 2, 4, 6)
        return tiles.permute(order).reshape(self.tokens, -1)

    def unpack(self, tokens: Tensor) -> Tensor:
        """The inverse of `pack`: [tokens, C * depth * patch * patch] ->
        [C, depth * frames, patch * height, patch * width].
        """
        grid, patch = (self.frames, self.height, self.width), (self.depth, self.patch, self.patch)
        if self.channels_last:
            tiles = tokens.reshape(*grid, *patch, -1).permute(6, 0, 3, 1, 4, 2, 5)
        else:
            tiles = tokens.reshape(*grid, -1, *patch).permute(3, 0, 4, 1, 5, 2, 6)
        return tiles.reshape(tiles.shape[0], *(n * p for n, p in zip(grid, patch, strict=True)))
