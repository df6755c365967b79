"""Helios, text, picture or video to video: what happens before, around and after the denoiser, chunk by chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.helios import CHUNK, PATCH, TEXT_TOKENS
from omni_grpc.models.helios.helios_past import HeliosState, HeliosVae, Start
from omni_grpc.models.helios.helios_transformer import HeliosTransformer
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import Rows
from omni_grpc.pipeline.base import Finished, Outcome, Pipeline, SegmentFinished
from omni_grpc.pipeline.batch import alone
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.pipeline.state import COND, Conditioning, State, Tables, prompts
from omni_grpc.pipeline.umt5 import Umt5Text
from omni_grpc.resolve.frames import segments
from omni_grpc.types.request import Request


class HeliosPipeline(Pipeline):
    """Prompts become hidden states of UMT5, noise becomes the latents of a chunk, which the next chunks go by."""

    def __init__(self, loader: Loader, transformer: HeliosTransformer, text: Umt5Text, vae: HeliosVae) -> None:
        super().__init__()
        self.checkpoint, self.device, self.dtype = loader.checkpoint, loader.device, loader.dtype
        self.transformer, self.text, self.vae = transformer, text, vae

    @classmethod
    def load(cls, loader: Loader) -> Self:
        return cls(
            loader,
            transformer=loader.denoiser("transformer", HeliosTransformer.from_config),
            text=Umt5Text(loader.module("text_encoder"), loader.tokenizer("tokenizer"), TEXT_TOKENS),
            vae=HeliosVae(loader.module("vae")),
        )

    def prepare(self, request: Request) -> list[State]:
        frames = self.checkpoint.limits.segment_frames
        start = self.vae.start(self.checkpoint.spec.preprocess(request, self.checkpoint.configs), frames)
        states = [self._state(request, output, seed, start) for output, seed in enumerate(request.seeds)]
        fields = {branch: field for field, (branch, _) in prompts(request).items()}
        texts = {branch: self.text.encode(text) for branch, text in prompts(request).values()}
        states[0].cond = self._conds(states[0], {branch: text.hidden for branch, text in texts.items()})
        for state in states:
            state.cond = self._recall(state, states[0].cond)
            state.prompt_tokens = texts[COND].tokens
            state.dropped_tokens = {fields[branch]: text.dropped for branch, text in texts.items() if text.dropped}
        return list(states)

    def _state(self, request: Request, output: int, seed: int, start: Start | None) -> HeliosState:
        multiple = self.checkpoint.limits.size_multiple
        grid = Grid(frames=CHUNK, height=request.height // multiple, width=request.width // multiple, patch=PATCH)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.vae.channels, 1, PATCH * grid.height, PATCH * grid.width)
        first, last = self.vae.past(start, shape, generator)
        return HeliosState(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=self._noise(grid, generator),
            grid=grid,
            schedule=self._schedule(request, grid),
            guidance=request.guidance,
            segments=segments(request.num_frames, self.checkpoint.limits),
            first=first,
            last=last,
            begun=start is not None,
        )

    def _noise(self, grid: Grid, generator: torch.Generator) -> Tensor:
        """Noise comes in float32 from a generator on the CPU, chunk after chunk: a seed means the same noise on any
        device, in any batch and in any dtype.
        """
        shape = (self.vae.channels, grid.frames, PATCH * grid.height, PATCH * grid.width)
        return grid.pack(torch.randn(shape, generator=generator).to(self.device))

    def _schedule(self, request: Request, grid: Grid) -> Schedule:
        config = self.checkpoint.configs["scheduler"]
        sigmas = np.linspace(0.999, 0.0, request.steps + 1)[:-1].tolist()
        levels = Levels(steps=request.steps, sigmas=sigmas, mu=dynamic_shift(config, grid.tokens))
        return Schedule(config, levels, device=self.device)

    def _conds(self, state: State, hidden: dict[str, Tensor]) -> dict[str, Conditioning]:
        """What each branch is conditioned on in every chunk."""
        row = self.transformer.row(TEXT_TOKENS, state.grid.height, state.grid.width)
        positions = self.transformer.positions(state.grid.height, state.grid.width)
        t = torch.tensor(state.schedule.timesteps, device=self.device)
        conds, tables = {}, Tables()
        for branch, embeds in hidden.items():
            with alone(state, branch, row):
                tables.update(tables or self.transformer.modulation(t, self.dtype))
                conds[branch] = Conditioning(
                    row=row, constants=self.transformer.text(embeds) | positions, tables=tables
                )
        return conds

    def _recall(self, state: HeliosState, conds: Mapping[str, Conditioning]) -> dict[str, Conditioning]:
        """The conds of a state with the tokens of what came before its chunk, which both branches go by alike."""
        with alone(state, COND, conds[COND].row):
            past = self.transformer.history(state.first.to(self.dtype), state.last.to(self.dtype))
        return {
            branch: dataclasses.replace(cond, constants={**cond.constants, **past}) for branch, cond in conds.items()
        }

    def predict(self, batch: Rows) -> Tensor:
        with activate(batch):
            velocity: Tensor = self.transformer(batch["latents"].to(self.dtype), batch)
        return velocity

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        assert isinstance(state, HeliosState)
        outcome = super().advance(state, prediction)
        if not isinstance(outcome, Finished) or state.segment + 1 == state.segments:
            return outcome
        finished, chunk = state.latents, state.grid.unpack(state.latents)
        state.first = state.first if state.begun else chunk[:, :1]
        state.begun = True
        state.last = torch.cat([state.last, chunk], 1)[:, -state.last.shape[1] :]
        state.cond = self._recall(state, state.cond)
        state.latents = self._noise(state.grid, state.generator)
        state.schedule = self._schedule(state.request, state.grid)
        state.segment, state.evaluation = state.segment + 1, 0
        return SegmentFinished(finished)

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        return [self.checkpoint.spec.postprocess(self.vae.decode(state.grid.unpack(latents)))]

    def join(self, parts: Sequence[Output]) -> Output:
        """Chunks end to end, without so many frames at the end that 4 k + 1 are left, as diffusers has it."""
        whole = super().join(parts)
        assert whole.pixels is not None
        step = self.checkpoint.limits.segment_frames // (CHUNK - 1)
        return dataclasses.replace(whole, pixels=whole.pixels[: (len(whole.pixels) - 1) // step * step + 1])
