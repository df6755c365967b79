"""VAEs behind one interface: pixels in -1..1 on one side, latents as the denoiser sees them on the other."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from omni_grpc.pipeline.causal_vae import optimize_causal_vae
from omni_grpc.pipeline.tiles import Tiling, decode_tiled
from omni_grpc.types.spec import vae_scale_factor

Decode = Callable[[Tensor], Tensor]
"""`Vae.decode`, or a feature around it."""


class Vae(nn.Module, abc.ABC):
    """A VAE of diffusers (`module`) and how its latents are normalized. `channels`: latent channels. `tiling`: the
    tiles that it decodes in, where it is told to.
    """

    channels: int
    tiling: Tiling = Tiling()
    _wrapped: Decode | None = None

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._in_tiles = False

    @abc.abstractmethod
    def encode(self, frames: Tensor) -> Tensor:
        """Frames [3, frames, height, width] in -1..1 -> the mode of their latents, normalized, [C, frames, h, w].

        An image is one frame.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Normalized latents [C, frames, h, w] -> frames [frames, 3, height, width] in -1..1, in the VAE's dtype; in
        tiles, float32.
        """
        if not self._in_tiles:
            return self.decode_whole(latents)
        return decode_tiled(self.decode_whole, latents, self.tiling, self.downscale)

    def decode_whole(self, latents: Tensor) -> Tensor:
        """What `decode` does, at once."""
        return self.decode_latents(latents) if self._wrapped is None else self._wrapped(latents)

    def wrap_decode(self, middleware: Callable[[Decode], Decode]) -> None:
        """Puts a feature around `decode_whole`."""
        self._wrapped = middleware(self._wrapped or self.decode_latents)

    @abc.abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """`decode_whole` without what features put around it: [C, frames, h, w] -> [frames, 3, height, width]."""

    @contextlib.contextmanager
    def in_tiles(self, tiled: bool) -> Iterator[None]:
        """Whether `decode` goes by tiles meanwhile. Only the thread that decodes may call it."""
        self._in_tiles = tiled
        try:
            yield
        finally:
            self._in_tiles = False

    @property
    def downscale(self) -> int:
        """Pixels along an edge that are one latent pixel."""
        config = self.module.config
        return vae_scale_factor(config) * (config.get("patch_size") or 1)

    def _own(self) -> Any:
        """The module as an object of its own with the same weights. What diffusers keeps in its attributes while it
        runs, and whether it goes by tiles, is of one call: one request may be encoded while another is decoded.
        """
        return copy.copy(self.module)

    def _undivided(self) -> Any:
        """The same, for a decode. `--vae-use-tiling` has diffusers encode in tiles; how decodes are divided is up to
        `decode`.
        """
        own = self._own()
        own.use_tiling = False
        # whoever saves memory has no use for a batch of frames
        own.use_slicing = self._in_tiles or own.use_slicing
        return own


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
        pixels: Tensor = self._undivided().decode(unscaled, return_dict=False)[0]
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
        pixels: Tensor = self._undivided().decode(video / (1 / std) + mean, return_dict=False)[0]
        return pixels[0].transpose(0, 1)

    def _scale(self, like: Tensor) -> tuple[Tensor, ...]:
        """Mean and standard deviation of the latents, by channel."""
        return tuple(
            torch.tensor(values).to(like).view(1, -1, 1, 1, 1)
            for values in (self.module.config.latents_mean, self.module.config.latents_std)
        )
