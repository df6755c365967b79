"""Wan, image to video: the frames that are given come as further channels of every token."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.models.wan import frames_per_latent
from omni_grpc.models.wan.pipeline_text_to_video import Constants, WanPipeline, WanState
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.rows import Rows, Runs
from omni_grpc.pipeline.pictures import pixels


class WanImageToVideoPipeline(WanPipeline):
    """A video of the given frames, grey between them, goes through the VAE. With a mask of what is given it is bound to
    the rows as "given" [T_img, C].
    """

    def _video(self, states: list[WanState]) -> tuple[Runs, Constants]:
        runs, constants = super()._video(states)
        return runs, constants | {"given": (IMG, states[0].grid.pack(self._given(states[0])).to(self.dtype))}

    def _given(self, state: WanState) -> Tensor:
        """Mask, then latents, [C, frames, height, width]. The mask has a channel for each of the frames that a latent
        stands for; the first latent stands for one, which counts for all.
        """
        request, inputs = state.request, state.request.inputs
        assert inputs.first_frame is not None
        assert request.num_frames is not None
        video = torch.zeros(3, request.num_frames, request.height, request.width)
        video[:, 0] = pixels(inputs.first_frame, width=request.width, height=request.height)
        if inputs.last_frame is not None:
            video[:, -1] = pixels(inputs.last_frame, width=request.width, height=request.height)
        latents = self.vae.encode(video)
        mask = latents.new_zeros(frames_per_latent(self.configs), *latents.shape[1:])
        mask[:, 0] = 1
        if inputs.last_frame is not None:
            mask[-1, -1] = 1
        return torch.cat([mask, latents])

    def _tokens(self, batch: Rows) -> Tensor:
        # values are ordered channel first, so further channels are further values
        return torch.cat([super()._tokens(batch), batch["given"]], 1)
