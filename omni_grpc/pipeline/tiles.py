"""Decoding in tiles: a VAE that decodes a part of the picture at a time needs the memory of that part.

Tiles overlap, and where they do, one fades into the next. So no seam shows, but what a convolution, a norm or the
attention of the VAE sees ends at the edge of its tile: the result is close to that of the whole, not equal to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """The edge of a tile and what it has in common with the next, in pixels."""

    edge: int = 512
    overlap: int = 128

    @property
    def area(self) -> int:
        """Pixels of a tile."""
        return self.edge**2

    def of_latents(self, downscale: int) -> tuple[int, int]:
        """Edge and overlap in latent pixels, one at least: `downscale` pixels along an edge are one of them."""
        edge = max(2, self.edge // downscale)
        return edge, min(max(1, self.overlap // downscale), edge - 1)


def decode_tiled(decode: Callable[[Tensor], Tensor], latents: Tensor, tiling: Tiling, downscale: int) -> Tensor:
    """Latents [C, frames, h, w] -> float32 [frames', 3, height, width], by `decode`, which makes [frames', 3, ...] of a
    part of them; what is no larger than a tile is decoded whole. `downscale`: pixels along an edge for each latent one.
    """
    edge, overlap = tiling.of_latents(downscale)
    height, width = latents.shape[-2:]
    if height <= edge and width <= edge:
        return decode(latents)
    rows, columns = (list(_spans(length, edge, overlap)) for length in (height, width))
    out: Tensor | None = None
    for (top, bottom), down in zip(rows, _fades(rows, overlap, downscale, latents.device), strict=True):
        for (left, right), across in zip(columns, _fades(columns, overlap, downscale, latents.device), strict=True):
            tile = decode(latents[:, :, top:bottom, left:right]).float()
            if out is None:
                out = tile.new_zeros(*tile.shape[:2], height * downscale, width * downscale)
            part = out[..., top * downscale : bottom * downscale, left * downscale : right * downscale]
            part.addcmul_(tile, down[:, None] * across)
    assert out is not None
    return out


def _spans(length: int, edge: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each tile along one axis, evenly spread, so that each is as long as the others."""
    if length <= edge:
        yield 0, length
        return
    count = -(-(length - overlap) // (edge - overlap))
    for index in range(count):
        begin = round(index * (length - edge) / (count - 1))
        yield begin, begin + edge


def _fades(spans: list[tuple[int, int]], overlap: int, downscale: int, device: torch.device) -> list[Tensor]:
    """The weight of each tile along one axis, float32 [pixels]. Over all tiles they sum to 1 at each pixel."""
    length, fade = spans[-1][1] * downscale, overlap * downscale
    weights = torch.zeros(len(spans), length, device=device)
    for weight, (begin, end) in zip(weights, spans, strict=True):
        size = (end - begin) * downscale
        at = torch.arange(size, device=device) + 0.5
        up = at / fade if begin else torch.ones_like(at)
        down = (size - at) / fade if end * downscale < length else torch.ones_like(at)
        weight[begin * downscale : end * downscale] = torch.minimum(up, down).clamp(max=1.0)
    weights /= weights.sum(0)
    return [weight[begin * downscale : end * downscale] for weight, (begin, end) in zip(weights, spans, strict=True)]
