"""Pictures of latents, for a look at what is coming: a linear map to RGB, next to free."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.ops.image import latents_to_bytes
from omni_grpc.pipeline.outputs import Pixels
from omni_grpc.types.spec import LatentRgb


def predict_x0(latents: Tensor, origin: Tensor, sigma: float, following: float) -> Tensor:
    """Where the last step leads: the line from `origin` (noise level `sigma`) through `latents` (level `following`),
    drawn out to no noise at all, of any shape.

    For x = (1 - sigma) * clean + sigma * noise and Euler's step it is the clean prediction itself, x - sigma * velocity
    (https://arxiv.org/abs/2209.03003). Noisy latents show nothing of the picture before the last few steps.
    """
    if sigma == following:
        return latents
    return latents + (latents - origin) * (following / (sigma - following))


def latent_preview(latents: Tensor, rgb: LatentRgb | None) -> Pixels:
    """Latents as an image [C, height, width] -> height x width x 3, one pixel for each latent pixel.

    Without a map of the model's own, the channels are summed up in three groups, and the result is stretched to the
    range that can be seen: shapes are right, colours mean nothing.
    """
    if rgb is not None:
        made = latents_to_bytes(latents, [factor for channel in rgb.factors for factor in channel], rgb.bias)
    else:
        grouped = torch.stack([group.sum(0) for group in latents.float().tensor_split(3)], -1)
        low, high = grouped.amin((0, 1)), grouped.amax((0, 1))
        unit = (grouped - low) / (high - low).clamp_min(1e-6)
        made = unit.nan_to_num(0.0).mul(255).round().to(torch.uint8)
    image: Pixels = made.cpu().numpy()
    return image
