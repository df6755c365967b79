"""What a chunk goes by: the latents before it, and before the first one nothing, a picture, or another video."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.models.helios import HISTORY
from omni_grpc.pipeline.state import State
from omni_grpc.pipeline.wan_vae import WanVae
from omni_grpc.types.errors import InvalidArgument, Violation

NOISE = (0.111, 0.135)
"""Between these lies the share of noise in each given frame: the transformer was trained on a past like its own."""


@dataclasses.dataclass(kw_only=True, eq=False)
class HeliosState(State):
    """`first` and `last` are the latent frames that a chunk goes by, float32 [C, frames, h, w]: the first of all, and
    the last ones before the chunk. They are zero where there are none yet; `begun` says whether there were some before
    the first chunk.
    """

    first: Tensor
    last: Tensor
    begun: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Latents of the given frames as the VAE's distributions: of the first frame, and of chunks of them. A picture is a
    chunk that stands still, and has its last latent frame in the past alone.
    """

    first: Any
    chunks: tuple[Any, ...]
    stands_still: bool


class HeliosVae(WanVae):
    """The VAE of Wan, with latents that are drawn."""

    def start(self, given: Mapping[str, Tensor], chunk: int) -> Start | None:
        """The given frames, in the video's size, encoded in chunks of so many. Of a video those at its beginning are
        left out that do not fill a chunk. Raises InvalidArgument for too short a one.
        """
        if "first_frame" in given:
            still = given["first_frame"][:, None]
            return Start(self._posterior(still), (self._posterior(still.expand(-1, chunk, -1, -1)),), True)
        if "source_video" not in given:
            return None
        frames = given["source_video"]
        if (count := frames.shape[1]) < chunk:
            why = f"has {count} frames; Helios goes by {chunk} at least"
            raise InvalidArgument(f"source_video: {why}", violations=(Violation("source_video", why),))
        chunks = frames[:, count % chunk :].split(chunk, 1)
        return Start(self._posterior(frames[:, :1]), tuple(map(self._posterior, chunks)), False)

    def past(self, start: Start | None, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The first latent frame and the last ones, float32 [C, frames, h, w], drawn in the order of diffusers; zeros
        where there are none. `shape` is that of one latent frame.
        """
        none = torch.zeros(shape, device=self.module.device).expand(-1, sum(HISTORY.values()), -1, -1)
        if start is None:
            return none[:, :1], none
        first, *chunks = (self._draw(posterior, generator) for posterior in (start.first, *start.chunks))
        if start.stands_still:
            chunks = [chunks[0][:, -1:]]
        first, *chunks = (_noised(latents, generator) for latents in (first, *chunks))
        return first, torch.cat([none, *chunks], 1)[:, -none.shape[1] :]

    def _posterior(self, frames: Tensor) -> Any:
        """Frames [3, frames, height, width] in -1..1 -> the distribution of their latents."""
        return self._own().encode(frames[None].to(self.module.device, self.module.dtype)).latent_dist

    def _draw(self, posterior: Any, generator: torch.Generator) -> Tensor:
        latents = posterior.sample(generator)
        mean, std = self._scale(latents)
        drawn: Tensor = ((latents - mean) * (1 / std))[0].float()
        return drawn


def _noised(latents: Tensor, generator: torch.Generator) -> Tensor:
    """Latents [C, frames, h, w], each frame with its own share of noise."""
    low, high = NOISE
    share = (torch.rand(latents.shape[1], generator=generator) * (high - low) + low).view(-1, 1, 1).to(latents)
    return share * torch.randn(latents.shape, generator=generator).to(latents) + (1 - share) * latents
