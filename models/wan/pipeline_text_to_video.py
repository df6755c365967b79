"""Wan, text to video: one transformer, or two experts of which the first takes the steps with the most noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from omni_grpc.loading.loader import Loader
from omni_grpc.models.wan import TEXT_TOKENS, frames_per_latent, pixels_per_token
from omni_grpc.models.wan.wan_transformer import WanTransformer
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import Row, Rows, Runs
from omni_grpc.pipeline.base import Finished, Outcome, Pipeline, advance
from omni_grpc.pipeline.batch import alone
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule
from omni_grpc.pipeline.state import COND, Conditioning, State, Tables, prompts
from omni_grpc.pipeline.umt5 import Text, Umt5Text
from omni_grpc.pipeline.wan_vae import WanVae
from omni_grpc.types.request import Guidance, Request

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
Constants = dict[str, tuple[str, Tensor]]


@dataclasses.dataclass(kw_only=True, eq=False)
class WanState(State):
    """`later`: the branches' conds under the expert that has not had its turn yet, by its name."""

    later: dict[str, dict[str, Conditioning]] = dataclasses.field(default_factory=dict)


class WanPipeline(Pipeline):
    """Prompts become hidden states of UMT5, noise becomes latents, latents become frames in the VAE."""

    def __init__(self, loader: Loader, experts: Mapping[str, WanTransformer]) -> None:
        super().__init__()
        self.spec, self.configs = loader.checkpoint.spec, loader.checkpoint.configs
        self.device, self.dtype = loader.device, loader.dtype
        self.experts = nn.ModuleDict(experts)
        self.text = Umt5Text(loader.module("text_encoder"), loader.tokenizer("tokenizer"), TEXT_TOKENS)
        self.vae = WanVae(loader.module("vae"))

    @classmethod
    def load(cls, loader: Loader) -> Self:
        two = loader.checkpoint.configs[""].get("boundary_ratio") is not None
        names = (HIGH_NOISE, LOW_NOISE) if two else (HIGH_NOISE,)
        return cls(loader, {name: loader.denoiser(name, WanTransformer.from_config) for name in names})

    def prepare(self, request: Request) -> list[State]:
        states = [self._state(request, output, seed) for output, seed in enumerate(request.seeds)]
        runs, video = self._video(states)
        row = Row.of(txt=TEXT_TOKENS, img=runs)
        fields = {branch: field for field, (branch, _) in prompts(request).items()}
        texts = {branch: self.text.encode(text) for branch, text in prompts(request).values()}
        dropped = {fields[branch]: text.dropped for branch, text in texts.items() if text.dropped}
        turns = [self._expert(states[0], evaluation) for evaluation in range(states[0].schedule.evaluations)]
        conds = {name: self._conds(name, states[0], row, texts, video) for name in dict.fromkeys(turns)}
        for state in states:
            state.later = dict(conds)
            state.cond = state.later.pop(turns[0])
            state.prompt_tokens, state.dropped_tokens = texts[COND].tokens, dropped
        return list(states)

    def _state(self, request: Request, output: int, seed: int) -> WanState:
        """Noise comes in float32 from a generator on the CPU: a seed is the same noise on any device, in any dtype."""
        assert request.num_frames is not None
        side, patch = pixels_per_token(self.configs), self.configs["transformer"]["patch_size"][1]
        frames = (request.num_frames - 1) // frames_per_latent(self.configs) + 1
        grid = Grid(frames=frames, height=request.height // side, width=request.width // side, patch=patch)
        generator, levels = torch.Generator().manual_seed(seed), Levels(steps=request.steps)
        shape = (self.vae.channels, frames, patch * grid.height, patch * grid.width)
        return WanState(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=grid.pack(torch.randn(shape, generator=generator).to(self.device)),
            grid=grid,
            schedule=Schedule(self.configs["scheduler"], levels, device=self.device, name=request.scheduler),
            guidance=request.guidance,
        )

    def _video(self, states: list[WanState]) -> tuple[Runs, Constants]:
        """The video's part of a row, and what there is for each of its tokens that no step changes."""
        grid = states[0].grid
        transformer: Any = self.experts[HIGH_NOISE]
        return ((0, grid.tokens),), {"rope": (IMG, transformer.rope(grid.frames, grid.height, grid.width))}

    def _conds(
        self, name: str, state: State, row: Row, texts: Mapping[str, Text], video: Constants
    ) -> dict[str, Conditioning]:
        """What each branch is conditioned on under one expert. The second level of a row is timestep 0."""
        expert: Any = self.experts[name]
        t = torch.zeros(state.schedule.evaluations, row.levels)
        t[:, 0] = torch.tensor(state.schedule.timesteps)
        conds, tables = {}, Tables()
        for branch, text in texts.items():
            with alone(state, branch, row):
                if not tables:
                    vectors = expert.modulation(t.flatten().to(self.device), self.dtype)
                    tables.update({part: table.unflatten(0, t.shape) for part, table in vectors.items()})
                conds[branch] = Conditioning(row=row, constants=expert.text(text.hidden) | video, tables=tables)
        return conds

    def _expert(self, state: State, evaluation: int | None = None) -> str:
        """Whose turn an evaluation is; without one, the next."""
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
        assert isinstance(state, WanState)
        outcome = advance(state, prediction)
        if not isinstance(outcome, Finished) and (expert := self._expert(state)) in state.later:
            state.cond = state.later.pop(expert)
        return outcome

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        return [self.spec.postprocess(self.vae.decode(state.grid.unpack(latents)))]
