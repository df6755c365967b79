"""Between frames and latents, in the VAE of Wan that other families have too."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from omni_grpc.pipeline.causal_vae import simplified


class WanVae(nn.Module):
    """diffusers' AutoencoderKLWan, and the scale of its latents."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = simplified(module)
        self.channels: int = module.config.z_dim

    def encode(self, frames: Tensor) -> Tensor:
        """Frames [3, frames, height, width] in -1..1 -> latents float32 [C, frames, height, width]."""
        video = frames[None].to(self.module.device, self.module.dtype)
        latents: Tensor = self._own().encode(video).latent_dist.mode().float()
        mean, std = self._scale(latents)
        return ((latents - mean) * (1 / std))[0]

    def decode(self, latents: Tensor) -> Tensor:
        """The inverse of `encode`: [C, frames, height, width] -> frames [frames, 3, height, width] in -1..1."""
        video = latents[None].to(self.module.dtype)
        mean, std = self._scale(video)
        pixels: Tensor = self._own().decode(video / (1 / std) + mean, return_dict=False)[0]
        return pixels[0].transpose(0, 1)

    def _own(self) -> Any:
        """The module as an object of its own with the same weights. It keeps earlier frames in its attributes while it
        runs, and one request may be encoded while another is decoded.
        """
        return copy.copy(self.module)

    def _scale(self, like: Tensor) -> tuple[Tensor, ...]:
        """Mean and standard deviation of the latents, by channel."""
        return tuple(
            torch.tensor(values).to(like).view(1, -1, 1, 1, 1)
            for values in (self.module.config.latents_mean, self.module.config.latents_std)
        )
