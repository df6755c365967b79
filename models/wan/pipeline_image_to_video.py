"""Wan, image to video: the given frames come as further channels of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omni_grpc.models.wan import frames_per_latent
from omni_grpc.models.wan.pipeline_text_to_video import WanPipeline
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.rows import Rows, Runs
from omni_grpc.pipeline.latent_diffusion import Constants
from omni_grpc.pipeline.state import State
from omni_grpc.types.request import Request


class WanImageToVideoPipeline(WanPipeline):
    """A video of the given frames, gray between them, goes through the VAE. With a mask of what is given it is bound to
    the rows as "given" [T_img, C].
    """

    def _video_constants(self, states: Sequence[State], inputs: Mapping[str, Tensor]) -> tuple[Runs, Constants]:
        runs, constants = super()._video_constants(states, inputs)
        given = states[0].grid.pack(self._condition_latents(states[0].request, inputs))
        return runs, constants | {"given": (IMG, given.to(self.dtype))}

    def _condition_latents(self, request: Request, inputs: Mapping[str, Tensor]) -> Tensor:
        """Mask, then latents, [C, frames, height, width]. The mask has a channel for each of the frames that a latent
        stands for; the first latent stands for one, which counts for all.
        """
        assert request.num_frames is not None
        video = torch.zeros(3, request.num_frames, request.height, request.width)
        video[:, 0] = inputs["first_frame"]
        if "last_frame" in inputs:
            video[:, -1] = inputs["last_frame"]
        latents = self.vae.encode(video)
        mask = latents.new_zeros(frames_per_latent(self.configs), *latents.shape[1:])
        mask[:, 0] = 1
        if "last_frame" in inputs:
            mask[-1, -1] = 1
        return torch.cat([mask, latents])

    def _tokens(self, batch: Rows) -> Tensor:
        # values are ordered channel first, so further channels are further values
        return torch.cat([super()._tokens(batch), batch["given"]], 1)
