"""Wan TI2V: text to video, and from a first frame, which keeps its place in the video at timestep 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omni_grpc.models.wan.pipeline_text_to_video import WanPipeline
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.rows import Runs
from omni_grpc.pipeline.latent_diffusion import Constants
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.state import State


class WanTextImageToVideoPipeline(WanPipeline):
    """A first frame becomes context: its tokens follow those of the frames that are denoised, at a level of their own,
    with the rotary positions of the first frame.
    """

    def _video_constants(self, states: Sequence[State], inputs: Mapping[str, Tensor]) -> tuple[Runs, Constants]:
        runs, constants = super()._video_constants(states, inputs)
        first = inputs.get("first_frame")
        if first is None:
            return runs, constants
        one = dataclasses.replace(states[0].grid, frames=1)
        context = one.pack(self.vae.encode(first[:, None]))
        for state in states:
            state.context = context
            state.latents = state.latents[one.tokens :]
            state.grid = dataclasses.replace(state.grid, frames=state.grid.frames - 1)
        _, rope = constants["rope"]
        runs = ((0, states[0].grid.tokens), (1, one.tokens))
        return runs, {"rope": (IMG, rope.roll(-one.tokens, 0))}

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        """Puts the first frame's tokens, where there are any, before the denoised ones, latents [T, C]."""
        if state.context is None:
            return super().decode(state, latents)
        grid = dataclasses.replace(state.grid, frames=state.grid.frames + 1)
        video = grid.unpack(torch.cat([state.context, latents]))
        return [self.spec.postprocess(self.vae.decode(video))]
