"""Wan, image to video: the frames that are given come as further channels of every token."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.models.wan import frames_per_latent
from omni_grpc.models.wan.pipeline_text_to_video import Constants, WanPipeline, WanState
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.rows import Rows, Runs


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
        request = state.request
        given = self.spec.preprocess(request, self.configs)
        assert request.num_frames is not None
        video = torch.zeros(3, request.num_frames, request.height, request.width)
        video[:, 0] = given["first_frame"]
        if "last_frame" in given:
            video[:, -1] = given["last_frame"]
        latents = self.vae.encode(video)
        mask = latents.new_zeros(frames_per_latent(self.configs), *latents.shape[1:])
        mask[:, 0] = 1
        if "last_frame" in given:
            mask[-1, -1] = 1
        return torch.cat([mask, latents])

    def _tokens(self, batch: Rows) -> Tensor:
        # values are ordered channel first, so further channels are further values
        return torch.cat([super()._tokens(batch), batch["given"]], 1)
