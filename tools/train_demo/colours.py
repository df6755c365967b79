"""What painted scenes tell of a VAE: the linear map from its latents to colours, and how well it repaints them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from omni_grpc.scenes.layout import arrange, paint
from omni_grpc.scenes.wish import draw_wish

SCENES = 64


def latent_rgb(vae: AutoencoderKLQwenImage, *, scenes: int = SCENES, seed: int = 5) -> dict[str, Any]:
    """Factors and bias by least squares: from latents as they are denoised to the mean colour of their pixels."""
    latents, pixels = samples(vae, scenes, seed)
    ones = np.ones((len(latents), 1))
    solved, *_ = np.linalg.lstsq(np.concatenate([latents, ones], 1), pixels, rcond=None)
    # four digits are more than anyone sees, and the same on any machine
    rounded = solved.round(4).tolist()
    return {"factors": rounded[:-1], "bias": rounded[-1]}


def samples(vae: AutoencoderKLQwenImage, scenes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Latents [n, channels] and the mean colours of their pixels [n, 3] in -1..1."""
    pixels = painted(scenes, seed)
    latents = torch.cat([scaled(vae, part) for part in pixels.split(16)])
    colours = F.avg_pool2d(pixels, pixels.shape[-1] // latents.shape[-1])
    rows = [x.movedim(1, -1).flatten(0, 2).double().numpy() for x in (latents, colours)]
    return rows[0], rows[1]


def painted(scenes: int, seed: int) -> Tensor:
    """[scenes, 3, 128, 128] in -1..1."""
    rng = random.Random(seed)
    pictures = [paint(arrange(draw_wish(rng), 128, 128, rng)) for _ in range(scenes)]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.inference_mode()
def scaled(vae: AutoencoderKLQwenImage, pixels: Tensor) -> Tensor:
    """pixels [n, 3, height, width] -> latents [n, channels, height / 8, width / 8], scaled as they are denoised."""
    mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (vae.config.latents_mean, vae.config.latents_std))
    latents: Tensor = vae.encode(pixels[:, :, None]).latent_dist.mean[:, :, 0]
    return (latents - mean) / std


@torch.inference_mode()
def repainted(vae: AutoencoderKLQwenImage, *, scenes: int = 16, seed: int = 6) -> float:
    """PSNR in dB of scenes that went through the VAE and back."""
    pixels = painted(scenes, seed)
    parts = [vae.decode(vae.encode(part[:, :, None]).latent_dist.mean).sample[:, :, 0] for part in pixels.split(16)]
    error = (torch.cat(parts).clamp(-1, 1) - pixels).pow(2).mean()
    return float(-10 * torch.log10(error / 4))
