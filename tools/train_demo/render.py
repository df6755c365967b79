"""Draws many scenes at once on a GPU: what layout.paint does for one."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.scenes.shapes import COLOURS, SHAPES


def render(things: Tensor, ground: Tensor, width: int, height: int) -> Tensor:
    """things [n, K, 5] and ground [n, 3] as in pool.Pool -> pixels [n, 3, height, width] in -1..1."""
    device = things.device
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=device)
    down = (torch.arange(height, device=device) + 0.5).view(1, 1, height, 1)
    right = (torch.arange(width, device=device) + 0.5).view(1, 1, 1, width)
    first, second = (palette[ground[:, column].long()].view(-1, 3, 1, 1) for column in (0, 1))
    vertical = ground[:, 2].view(-1, 1, 1, 1) > 0
    share = torch.where(vertical, down / height, right / width)
    picture = first * (1 - share) + second * share
    for place in range(things.shape[1]):
        colour, shape, x, y, radius = (things[:, place, part].view(-1, 1, 1, 1) for part in range(5))
        pixels = (radius * min(width, height)).clamp_min(1.0)
        across, up = (right - x * width) / pixels, (y * height - down) / pixels
        distance = torch.full_like(across * up, 1e3)
        for number, function in enumerate(SHAPES.values()):
            chosen = (shape == number).flatten().nonzero().flatten()
            distance[chosen] = function(torch, across[chosen] + 0 * up[chosen], up[chosen] + 0 * across[chosen])
        covered = (0.5 - distance * pixels).clamp(0, 1)
        own = palette[colour.flatten().clamp_min(0).long()].view(-1, 3, 1, 1)
        picture = picture * (1 - covered) + own * covered
    return picture / 127.5 - 1
