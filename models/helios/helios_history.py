"""The history that a chunk is conditioned on: the latents before it, or at first an image, a video or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.models.helios import HISTORY
from omni_grpc.pipeline.state import State
from omni_grpc.pipeline.vae import CausalVae
from omni_grpc.types.errors import InvalidArgument, Violation

NOISE_SHARE = (0.111, 0.135)
"""The range of the share of noise that is added to each given frame: the transformer was trained on a noisy history."""


@dataclasses.dataclass(kw_only=True, eq=False)
class HeliosState(State):
    """`first` and `last`: the latent frames that a chunk is conditioned on, float32 [C, frames, h, w]: the first of
    the video, and the last ones before the chunk. They are zero where there are none yet. `has_first`: whether `first`
    is known.
    """

    first: Tensor
    last: Tensor
    has_first: bool


@dataclasses.dataclass(frozen=True, eq=False)
class StartFrames:
    """The posteriors of the VAE for the frames that a request gives: for the first frame, and for chunks of frames. An
    image is repeated to one chunk (`still`), of which only the last latent frame is used.
    """

    first: Any
    chunks: tuple[Any, ...]
    still: bool


class HeliosVae(CausalVae):
    """The VAE of Wan, whose latents are sampled here."""

    def encode_start(self, given: Mapping[str, Tensor], chunk: int) -> StartFrames | None:
        """The given image [3, height, width] or video [3, frames, height, width], encoded in chunks of `chunk` frames;
        None where there is none. Frames at the beginning of a video that do not fill a chunk are left out. Raises
        InvalidArgument for a video that is too short.
        """
        if "first_frame" in given:
            still = given["first_frame"][:, None]
            return StartFrames(self._posterior(still), (self._posterior(still.expand(-1, chunk, -1, -1)),), True)
        if "source_video" not in given:
            return None
        frames = given["source_video"]
        if (count := frames.shape[1]) < chunk:
            why = f"has {count} frames; Helios goes by {chunk} at least"
            raise InvalidArgument(f"source_video: {why}", violations=(Violation("source_video", why),))
        chunks = frames[:, count % chunk :].split(chunk, 1)
        return StartFrames(self._posterior(frames[:, :1]), tuple(map(self._posterior, chunks)), False)

    def history(
        self, start: StartFrames | None, shape: Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The first latent frame and the last ones, float32 [C, frames, h, w], sampled in the order of diffusers; zeros
        where there are none. `shape`: of one latent frame.
        """
        none = torch.zeros(shape, device=self.module.device).expand(-1, sum(HISTORY.values()), -1, -1)
        if start is None:
            return none[:, :1], none
        first, *chunks = (self._sample(posterior, generator) for posterior in (start.first, *start.chunks))
        if start.still:
            chunks = [chunks[0][:, -1:]]
        first, *chunks = (_add_noise(latents, generator) for latents in (first, *chunks))
        return first, torch.cat([none, *chunks], 1)[:, -none.shape[1] :]

    def _posterior(self, frames: Tensor) -> Any:
        """Frames [3, frames, height, width] in -1..1 -> the distribution of their latents."""
        return self._own().encode(frames[None].to(self.module.device, self.module.dtype)).latent_dist

    def _sample(self, posterior: Any, generator: torch.Generator) -> Tensor:
        latents = posterior.sample(generator)
        mean, std = self._scale(latents)
        normalized: Tensor = ((latents - mean) * (1 / std))[0].float()
        return normalized


def _add_noise(latents: Tensor, generator: torch.Generator) -> Tensor:
    """Latents [C, frames, h, w], each frame with its own share of noise."""
    low, high = NOISE_SHARE
    share = (torch.rand(latents.shape[1], generator=generator) * (high - low) + low).view(-1, 1, 1).to(latents)
    return share * torch.randn(latents.shape, generator=generator).to(latents) + (1 - share) * latents
