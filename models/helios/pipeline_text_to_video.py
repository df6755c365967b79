"""Helios, text to video: what happens before, around and after the denoiser, chunk by chunk."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self
from weakref import WeakValueDictionary

import ftfy
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.frames import segments
from omni_grpc.loading.loader import Loader
from omni_grpc.models.helios import CHUNK, HISTORY, PATCH, TEXT_TOKENS
from omni_grpc.models.helios.helios_transformer import HeliosTransformer
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.pipeline.base import Done, Outcome, Pipeline, Segment
from omni_grpc.pipeline.outputs import Output, to_uint8
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.pipeline.state import COND, UNCOND, Cond, State, Tables
from omni_grpc.request import Request
from omni_grpc.spec import Checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """Latent frames that a chunk goes by, float32 [C, frames, h, w]: the first of the video, and the last ones. They are
    zero where there are none yet.
    """

    first: Tensor
    last: Tensor

    def after(self, chunk: Tensor, *, is_first: bool) -> Past:
        """What the chunk that follows `chunk` goes by."""
        frames = self.last.shape[1]
        return Past(chunk[:, :1] if is_first else self.first, torch.cat([self.last, chunk], 1)[:, -frames:])


class HeliosPipeline(Pipeline):
    """Prompts become hidden states of UMT5, noise becomes the latents of a chunk, which go into those of the next."""

    def __init__(
        self, checkpoint: Checkpoint, *, transformer: HeliosTransformer, text_encoder: Any, tokenizer: Any, vae: Any
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.vae = vae
        self.dtype = transformer.proj_out.weight.dtype
        self.device = transformer.proj_out.weight.device
        # requests of the same timesteps share their tables for as long as one of them lives
        self._tables: WeakValueDictionary[tuple[float, ...], Tables] = WeakValueDictionary()

    @classmethod
    def load(cls, loader: Loader) -> Self:
        return cls(
            loader.checkpoint,
            transformer=loader.denoiser("transformer", HeliosTransformer.from_config),
            text_encoder=loader.module("text_encoder"),
            tokenizer=loader.tokenizer("tokenizer"),
            vae=loader.module("vae"),
        )

    def prepare(self, request: Request) -> list[State]:
        states = [self._state(request, output, seed) for output, seed in enumerate(request.seeds)]
        first, dropped = states[0], {}
        prompts = {"prompt": (COND, request.prompt)}
        if request.negative_prompt is not None:
            prompts["negative_prompt"] = (UNCOND, request.negative_prompt)
        for field, (branch, text) in prompts.items():
            embeds, tokens, dropped[field] = self._encode(text)
            first.prompt_tokens = first.prompt_tokens or tokens
            first.cond[branch] = self._condition(first, branch, embeds)
        first.cond = self._recall(first)
        for state in states:
            state.cond = dict(first.cond)
            state.prompt_tokens = first.prompt_tokens
            state.dropped_tokens = {field: count for field, count in dropped.items() if count}
        return states

    def _state(self, request: Request, output: int, seed: int) -> State:
        multiple = self.checkpoint.limits.size_multiple
        grid = Grid(frames=CHUNK, height=request.height // multiple, width=request.width // multiple, patch=PATCH)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.vae.config.z_dim, 1, PATCH * grid.height, PATCH * grid.width)
        none = torch.zeros(shape, device=self.device)
        return State(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=self._noise(grid, generator),
            grid=grid,
            schedule=self._schedule(request, grid),
            guidance=request.guidance,
            memory=Past(none, none.expand(-1, sum(HISTORY.values()), -1, -1)),
            segments=segments(request.num_frames, self.checkpoint.limits),
        )

    def _noise(self, grid: Grid, generator: torch.Generator) -> Tensor:
        """Noise comes from a generator on the CPU, chunk after chunk: a seed means the same noise on any device."""
        shape = (self.vae.config.z_dim, grid.frames, PATCH * grid.height, PATCH * grid.width)
        return grid.pack(torch.randn(shape, generator=generator).to(self.device))

    def _schedule(self, request: Request, grid: Grid) -> Schedule:
        config = self.checkpoint.configs["scheduler"]
        sigmas = np.linspace(0.999, 0.0, request.steps + 1)[:-1].tolist()
        levels = Levels(steps=request.steps, sigmas=sigmas, mu=dynamic_shift(config, grid.tokens))
        return Schedule(config, levels, device=self.device)

    def _encode(self, text: str) -> tuple[Tensor, int, int]:
        """Hidden states of the prompt's tokens and of its padding, which are zero, [512, C]; how many tokens there are,
        and how many did not fit.
        """
        text = " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())
        total = len(self.tokenizer(text).input_ids)
        tokens = self.tokenizer(text, truncation=True, max_length=TEXT_TOKENS).input_ids
        hidden = self.text_encoder(torch.tensor([tokens], device=self.device)).last_hidden_state[0]
        return F.pad(hidden, (0, 0, 0, TEXT_TOKENS - len(tokens))), len(tokens), total - len(tokens)

    def _condition(self, state: State, branch: str, embeds: Tensor) -> Cond:
        """What all chunks have in common."""
        height, width = state.grid.height, state.grid.width
        row = self.transformer.row(len(embeds), height, width)
        with self._alone(state, branch, row):
            text = self.transformer.text(embeds)
            tables = self._tables.get(state.schedule.timesteps)
            if tables is None:
                t = torch.tensor(state.schedule.timesteps, device=self.device)
                tables = self._tables[state.schedule.timesteps] = Tables(self.transformer.modulation(t))
        return Cond(row=row, constants={**text, **self.transformer.positions(height, width)}, tables=tables)

    def _recall(self, state: State) -> dict[str, Cond]:
        """The state's conds with the tokens of its past."""
        with self._alone(state, COND, state.cond[COND].row):
            past = self.transformer.history(state.memory.first.to(self.dtype), state.memory.last.to(self.dtype))
        return {
            branch: dataclasses.replace(cond, constants={**cond.constants, **past})
            for branch, cond in state.cond.items()
        }

    def _alone(self, state: State, branch: str, row: Row) -> AbstractContextManager[Rows]:
        return activate(Rows([(state, branch)], [row], LayoutCache(self.device, capacity=1)))

    def predict(self, batch: Rows) -> Tensor:
        with activate(batch):
            velocity: Tensor = self.transformer(batch["latents"].to(self.dtype), batch)
        return velocity

    def advance(self, state: State, prediction: Tensor) -> Outcome:
        outcome = super().advance(state, prediction)
        if not isinstance(outcome, Done) or state.segment + 1 == state.segments:
            return outcome
        finished = state.latents
        state.memory = state.memory.after(state.grid.unpack(finished), is_first=state.segment == 0)
        state.cond = self._recall(state)
        state.latents, state.schedule = (
            self._noise(state.grid, state.generator),
            self._schedule(state.request, state.grid),
        )
        state.segment, state.evaluation = state.segment + 1, 0
        return Segment(finished)

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        mean, std = (
            torch.tensor(values, device=self.device, dtype=self.dtype).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        scaled = state.grid.unpack(latents)[None].to(self.dtype) / (1 / std) + mean
        return [Output(pixels=to_uint8(self.vae.decode(scaled, return_dict=False)[0][0].transpose(0, 1)))]

    def join(self, parts: Sequence[Output]) -> Output:
        """Chunks end to end; of the frames at the end so many are cut that 4 k + 1 are left, as in diffusers."""
        whole = super().join(parts)
        assert whole.pixels is not None
        step = self.vae.config.scale_factor_temporal
        return dataclasses.replace(whole, pixels=whole.pixels[: (len(whole.pixels) - 1) // step * step + 1])
