"""Wan, text to video: one transformer, or two experts of which the first takes the steps with the most noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from omni_grpc.loading.loader import Loader
from omni_grpc.models.wan import TEXT_TOKENS, frames_per_latent
from omni_grpc.models.wan.wan_transformer import WanTransformer
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import Row, Rows, Runs
from omni_grpc.pipeline.base import Finished, Outcome
from omni_grpc.pipeline.batch import single_row
from omni_grpc.pipeline.latent_diffusion import Constants, LatentDiffusionPipeline
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels
from omni_grpc.pipeline.state import Conditioning, State
from omni_grpc.pipeline.text_encoders import PromptEmbeds
from omni_grpc.pipeline.umt5 import Umt5TextEncoder
from omni_grpc.pipeline.vae import CausalVae
from omni_grpc.types.request import Guidance, Request

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"


@dataclasses.dataclass(kw_only=True, eq=False)
class WanState(State):
    """`pending`: the conds under the expert that has not had its turn yet, expert -> branch -> cond."""

    pending: dict[str, dict[str, Conditioning]] = dataclasses.field(default_factory=dict)


class WanPipeline(LatentDiffusionPipeline):
    """Prompts are encoded by UMT5. Latents stay in float32, whatever the dtype of the weights."""

    experts: nn.ModuleDict
    latents_dtype = torch.float32
    state_type = WanState

    @classmethod
    def load(cls, loader: Loader) -> Self:
        two = loader.checkpoint.configs[""].get("boundary_ratio") is not None
        names = (HIGH_NOISE, LOW_NOISE) if two else (HIGH_NOISE,)
        return cls(
            loader,
            experts=nn.ModuleDict({name: loader.denoiser(name, WanTransformer.from_config) for name in names}),
            text_encoder=Umt5TextEncoder(loader.module("text_encoder"), loader.tokenizer("tokenizer"), TEXT_TOKENS),
            vae=CausalVae(loader.module("vae")),
        )

    def grid(self, width: int, height: int, num_frames: int | None = None) -> Grid:
        assert num_frames is not None
        frames = (num_frames - 1) // frames_per_latent(self.configs) + 1
        patch = self.configs["transformer"]["patch_size"][1]
        return dataclasses.replace(super().grid(width, height), frames=frames, patch=patch)

    def levels(self, request: Request, grid: Grid) -> Levels:
        """Those of the scheduler, which spaces them itself."""
        return dataclasses.replace(super().levels(request, grid), sigmas=None)

    def condition(
        self, states: Sequence[State], embeds: Mapping[str, PromptEmbeds], inputs: Mapping[str, Tensor]
    ) -> None:
        """Computes conds for each expert that takes a step. A first frame among the inputs is [3, height, width]."""
        runs, video = self._video_constants(states, inputs)
        row = Row.of(txt=TEXT_TOKENS, img=runs)
        turns = [self._expert(states[0], evaluation) for evaluation in range(states[0].schedule.evaluations)]
        conds = {name: self._conds(name, states[0], row, embeds, video) for name in dict.fromkeys(turns)}
        for state in states:
            assert isinstance(state, WanState)
            state.pending = dict(conds)
            state.cond = state.pending.pop(turns[0])

    def _video_constants(self, states: Sequence[State], inputs: Mapping[str, Tensor]) -> tuple[Runs, Constants]:
        """The video's part of a row, and the constants of its tokens."""
        grid = states[0].grid
        transformer: Any = self.experts[HIGH_NOISE]
        return ((0, grid.tokens),), {"rope": (IMG, transformer.rope(grid.frames, grid.height, grid.width))}

    def _conds(
        self, name: str, state: State, row: Row, embeds: Mapping[str, PromptEmbeds], video: Constants
    ) -> dict[str, Conditioning]:
        """What each branch is conditioned on under one expert."""
        expert: Any = self.experts[name]
        conds = {}
        for branch, prompt in embeds.items():
            with single_row(state, branch, row):
                tables = self.tables(state, row, lambda t: expert.modulation(t, self.dtype), name)
                conds[branch] = Conditioning(row=row, constants=expert.text(prompt.hidden) | video, tables=tables)
        return conds

    def _expert(self, state: State, evaluation: int | None = None) -> str:
        """The expert that takes an evaluation; without one, the next."""
        if state.guidance.boundary_ratio is None:
            return HIGH_NOISE
        boundary = state.guidance.boundary_ratio * self.configs["scheduler"].get("num_train_timesteps", 1000)
        timestep = state.schedule.timesteps[state.evaluation if evaluation is None else evaluation]
        return HIGH_NOISE if timestep >= boundary else LOW_NOISE

    def predict(self, batch: Rows) -> Tensor:
        """Each expert runs once, on the rows whose turn it is."""
        turns: dict[str, list[int]] = {}
        for row, (state, _) in enumerate(batch.owners):
            turns.setdefault(self._expert(state), []).append(row)
        velocities: dict[int, Tensor] = {}
        for name, rows in turns.items():
            part = batch.narrow(rows)
            with activate(part):
                velocity: Tensor = self.experts[name](self._tokens(part), part)
            velocities |= zip(rows, part.stream(IMG).split(velocity), strict=True)
        return velocity if len(turns) == 1 else torch.cat([velocities[row] for row in range(len(batch))])

    def _tokens(self, batch: Rows) -> Tensor:
        """What the transformer reads, [T, C]."""
        return batch["latents"].to(self.dtype)

    def guidance(self, state: State) -> Guidance:
        given = state.guidance
        if given.scale_low_noise is None or self._expert(state) == HIGH_NOISE:
            return given
        return dataclasses.replace(given, true_cfg_scale=given.scale_low_noise)

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        """Given the guided prediction [T, C], switches to the conds of the other expert once its turn comes."""
        assert isinstance(state, WanState)
        outcome = super().advance(state, prediction)
        if not isinstance(outcome, Finished) and (expert := self._expert(state)) in state.pending:
            state.cond = state.pending.pop(expert)
        return outcome
