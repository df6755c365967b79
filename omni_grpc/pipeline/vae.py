"""VAEs behind one interface: pixels in -1..1 on one side, latents as the denoiser sees them on the other."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from omni_grpc.pipeline.causal_vae import optimize_causal_vae

Decode = Callable[[Tensor], Tensor]
"""`Vae.decode`, or a feature around it."""


class Vae(nn.Module, abc.ABC):
    """A VAE of diffusers (`module`) and how its latents are normalized. `channels`: latent channels."""

    channels: int
    _wrapped: Decode | None = None

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    @abc.abstractmethod
    def encode(self, frames: Tensor) -> Tensor:
        """Frames [3, frames, height, width] in -1..1 -> the mode of their latents, normalized, [C, frames, h, w].

        An image is one frame.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Normalized latents [C, frames, h, w] -> frames [frames, 3, height, width] in -1..1."""
        return self.decode_latents(latents) if self._wrapped is None else self._wrapped(latents)

    def wrap_decode(self, middleware: Callable[[Decode], Decode]) -> None:
        """Puts a feature around `decode`."""
        self._wrapped = middleware(self._wrapped or self.decode_latents)

    @abc.abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """`decode` without what features put around it: [C, frames, h, w] -> [frames, 3, height, width]."""


class ImageVae(Vae):
    """diffusers' AutoencoderKL (FLUX, Z-Image, SD3): a scaling factor and a shift for all channels. Frames are a batch
    of images.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.channels = module.config.latent_channels

    def encode(self, frames: Tensor) -> Tensor:
        """[3, frames, height, width] -> [C, frames, h, w], (latents - shift) * scale."""
        config = self.module.config
        latents: Tensor = self.module.encode(self._batch(frames)).latent_dist.mode()
        normalized: Tensor = (latents - config.shift_factor) * config.scaling_factor
        return normalized.transpose(0, 1)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """[C, frames, h, w] -> [frames, 3, height, width], decoded as a batch of images."""
        config = self.module.config
        unscaled = self._batch(latents) / config.scaling_factor + config.shift_factor
        pixels: Tensor = self.module.decode(unscaled, return_dict=False)[0]
        return pixels

    def _batch(self, frames: Tensor) -> Tensor:
        """[C, frames, h, w] -> [frames, C, h, w]. Convolutions round differently in another memory format."""
        return frames.transpose(0, 1).to(self.module.device, self.module.dtype).contiguous()


class CausalVae(Vae):
    """diffusers' AutoencoderKLWan and AutoencoderKLQwenImage: a mean and a standard deviation per channel. Latents are
    encoded to float32.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(optimize_causal_vae(module))
        self.channels = module.config.z_dim

    def encode(self, frames: Tensor) -> Tensor:
        """[3, frames, height, width] -> float32 [C, frames, h, w], (latents - mean) / std per channel."""
        video = frames[None].to(self.module.device, self.module.dtype)
        latents: Tensor = self._own().encode(video).latent_dist.mode().float()
        mean, std = self._scale(latents)
        return ((latents - mean) * (1 / std))[0]

    def decode_latents(self, latents: Tensor) -> Tensor:
        """[C, frames, h, w] -> [frames, 3, height, width] in the VAE's dtype."""
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
