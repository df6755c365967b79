"""Helios: text, image or video to video, chunk by chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.helios import CHUNK, PATCH, TEXT_TOKENS
from omni_grpc.models.helios.helios_history import HeliosState, HeliosVae, StartFrames
from omni_grpc.models.helios.helios_scheduler import SCHEDULERS
from omni_grpc.models.helios.helios_transformer import HeliosTransformer
from omni_grpc.pipeline.base import Finished, Outcome, SegmentFinished
from omni_grpc.pipeline.batch import single_row
from omni_grpc.pipeline.latent_diffusion import LatentDiffusionPipeline
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels
from omni_grpc.pipeline.state import COND, Conditioning, State
from omni_grpc.pipeline.text_encoders import PromptEmbeds
from omni_grpc.pipeline.umt5 import Umt5TextEncoder
from omni_grpc.resolve.frames import segments
from omni_grpc.types.request import Request


class HeliosPipeline(LatentDiffusionPipeline):
    """A video is made chunk by chunk; each is conditioned on those before it. Prompts are encoded by UMT5. Latents stay
    in float32, whatever the dtype of the weights.
    """

    transformer: HeliosTransformer
    vae: HeliosVae
    patch = PATCH
    latents_dtype = torch.float32
    state_type = HeliosState
    schedulers = SCHEDULERS

    @classmethod
    def load(cls, loader: Loader) -> Self:
        return cls(
            loader,
            transformer=loader.denoiser("transformer", HeliosTransformer.from_config),
            text_encoder=Umt5TextEncoder(loader.module("text_encoder"), loader.tokenizer("tokenizer"), TEXT_TOKENS),
            vae=HeliosVae(loader.module("vae")),
        )

    def encode_inputs(self, request: Request) -> StartFrames | None:
        return self.vae.encode_start(self.preprocess(request), self.checkpoint.limits.segment_frames)

    def grid(self, width: int, height: int, num_frames: int | None = None) -> Grid:
        """The tokens of one chunk, however long the video."""
        return dataclasses.replace(super().grid(width, height), frames=CHUNK)

    def state_fields(
        self, request: Request, grid: Grid, inputs: StartFrames | None, generator: torch.Generator
    ) -> Mapping[str, Any]:
        one = dataclasses.replace(grid, frames=1).latents_shape(self.vae.channels)
        first, last = self.vae.history(inputs, one, generator)
        count = segments(request.num_frames, self.checkpoint.limits)
        return {"segments": count, "first": first, "last": last, "has_first": inputs is not None}

    def levels(self, request: Request, grid: Grid) -> Levels:
        sigmas = np.linspace(0.999, 0.0, request.steps + 1)[:-1].tolist()
        return dataclasses.replace(super().levels(request, grid), sigmas=sigmas)

    def condition(
        self, states: Sequence[State], embeds: Mapping[str, PromptEmbeds], inputs: StartFrames | None
    ) -> None:
        grid = states[0].grid
        row = self.transformer.row(TEXT_TOKENS, grid.height, grid.width)
        positions = self.transformer.positions(grid.height, grid.width)
        conds = {}
        for branch, prompt in embeds.items():
            with single_row(states[0], branch, row):
                tables = self.shared_tables.get(states[0], lambda: self._modulation(states[0]))
                constants = self.transformer.text(prompt.hidden) | positions
                conds[branch] = Conditioning(row=row, constants=constants, tables=tables)
        for state in states:
            assert isinstance(state, HeliosState)
            state.cond = self._with_history(state, conds)

    def _modulation(self, state: State) -> dict[str, Tensor]:
        t = torch.tensor(state.schedule.timesteps, device=self.device)
        return self.transformer.modulation(t, self.dtype)

    def _with_history(self, state: HeliosState, conds: Mapping[str, Conditioning]) -> dict[str, Conditioning]:
        """The conds of a state with the tokens of its history, which are the same for all branches."""
        with single_row(state, COND, conds[COND].row):
            history = self.transformer.history(state.first.to(self.dtype), state.last.to(self.dtype))
        return {
            branch: dataclasses.replace(cond, constants={**cond.constants, **history}) for branch, cond in conds.items()
        }

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        """Given the guided prediction [T, C]. At the end of a chunk, moves the history on and starts the next from
        noise.
        """
        assert isinstance(state, HeliosState)
        outcome = super().advance(state, prediction)
        if not isinstance(outcome, Finished) or state.segment + 1 == state.segments:
            return outcome
        finished, chunk = state.latents, state.grid.unpack(state.latents)
        state.first = state.first if state.has_first else chunk[:, :1]
        state.has_first = True
        state.last = torch.cat([state.last, chunk], 1)[:, -state.last.shape[1] :]
        state.cond = self._with_history(state, state.cond)
        state.latents = self.noise(state.grid, state.generator)
        state.schedule = self.schedule(state.request, state.grid)
        state.segment, state.evaluation = state.segment + 1, 0
        return SegmentFinished(finished)

    def join(self, parts: Sequence[Output]) -> Output:
        """Chunks end to end, cut to 4 k + 1 frames as in diffusers."""
        whole = super().join(parts)
        assert whole.pixels is not None
        step = self.checkpoint.limits.segment_frames // (CHUNK - 1)
        return dataclasses.replace(whole, pixels=whole.pixels[: (len(whole.pixels) - 1) // step * step + 1])
