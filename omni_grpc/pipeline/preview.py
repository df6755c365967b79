"""Previews: the denoised latents that a step predicts, and their approximation in RGB, which costs next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.ops.image import latents_to_bytes
from omni_grpc.pipeline.outputs import Pixels
from omni_grpc.types.spec import LatentRgb


def predict_x0(latents: Tensor, origin: Tensor, sigma: float, following: float) -> Tensor:
    """The clean latents (x0) that the last step predicts, by extrapolation to noise level 0. The step went from
    `origin` at level `sigma` to `latents` at level `following`; both are [...], of any shape, and so is the result.

    For flow matching, x = (1 - sigma) * x0 + sigma * noise, and Euler's step it equals x - sigma * velocity
    (https://arxiv.org/abs/2209.03003). Noisy latents themselves show nothing of the image before the last few steps.
    """
    if sigma == following:
        return latents
    return latents + (latents - origin) * (following / (sigma - following))


def latent_preview(latents: Tensor, rgb: LatentRgb | None) -> Pixels:
    """Latents [C, height, width] -> uint8 [height, width, 3], one pixel for each latent pixel.

    rgb: the model's linear map to RGB. Without one, the channels are summed in three groups and the result is stretched
    to the visible range: shapes are right, colors mean nothing.
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
