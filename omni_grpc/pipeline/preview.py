"""Pictures of latents, for a look at what is coming: a linear map to RGB, next to free."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.pipeline.outputs import Pixels
from omni_grpc.spec import LatentRgb


def foreseen(latents: Tensor, origin: Tensor, sigma: float, following: float) -> Tensor:
    """Where the last step leads: the line from `origin` (noise level `sigma`) through `latents` (level `following`),
    drawn out to no noise at all, of any shape.

    For x = (1 - sigma) * clean + sigma * noise and Euler's step it is the clean prediction itself, x - sigma * velocity
    (https://arxiv.org/abs/2209.03003). Noisy latents show nothing of the picture before the last few steps.
    """
    if sigma == following:
        return latents
    return latents + (latents - origin) * (following / (sigma - following))


def latent_picture(latents: Tensor, rgb: LatentRgb | None) -> Pixels:
    """Latents as an image [C, height, width] -> height x width x 3, one pixel for each latent pixel.

    Without a map of the model's own, the channels are summed up in three groups, and the result is stretched to the
    range that can be seen: shapes are right, colours mean nothing.
    """
    latents = latents.float()
    if rgb is None:
        grouped = torch.stack([group.sum(0) for group in latents.tensor_split(3)])
        low, high = grouped.amin((1, 2), keepdim=True), grouped.amax((1, 2), keepdim=True)
        unit = (grouped - low) / (high - low).clamp_min(1e-6)
    else:
        factors, bias = (torch.tensor(values, device=latents.device) for values in (rgb.factors, rgb.bias))
        unit = (torch.einsum("chw,cr->rhw", latents, factors) + bias[:, None, None]) / 2 + 0.5
    pixels = unit.nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    image: Pixels = pixels.permute(1, 2, 0).contiguous().cpu().numpy()
    return image
