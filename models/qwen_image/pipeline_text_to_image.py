"""Qwen-Image, text to image: what happens before, around and after the denoiser."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.qwen_image import PATCH
from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import JOINT, Row, Rows
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.batch import alone
from omni_grpc.pipeline.causal_vae import simplified
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.pipeline.state import COND, Conditioning, State, prompts
from omni_grpc.pipeline.tables import SharedTables
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint

PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34


class QwenImagePipeline(Pipeline):
    """Prompts become hidden states of Qwen2.5-VL, noise becomes latents, latents become pixels in the VAE."""

    def __init__(
        self, checkpoint: Checkpoint, *, transformer: QwenImageTransformer, text_encoder: Any, tokenizer: Any, vae: Any
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.vae = vae
        self.dtype = transformer.proj_out.weight.dtype
        self.device = transformer.proj_out.weight.device
        self.size_multiple = checkpoint.limits.size_multiple
        self._tables = SharedTables()

    @classmethod
    def load(cls, loader: Loader) -> Self:
        tokenizer = loader.tokenizer("tokenizer")
        if (found := len(tokenizer(PREFIX).input_ids)) != PREFIX_TOKENS:
            raise CheckpointError(
                f"tokenizer: the prompt template starts with {found} tokens, expected {PREFIX_TOKENS}"
            )
        return cls(
            loader.checkpoint,
            transformer=loader.denoiser("transformer", QwenImageTransformer.from_config),
            # neither the vision tower nor the language model's head is read
            text_encoder=loader.module("text_encoder", part="model.language_model"),
            tokenizer=tokenizer,
            vae=simplified(loader.module("vae")),
        )

    def prepare(self, request: Request) -> list[State]:
        states = [self._state(request, output, seed) for output, seed in enumerate(request.seeds)]
        conds, dropped = {}, {}
        for field, (branch, text) in prompts(request).items():
            embeds, dropped[field] = self._encode(text)
            conds[branch] = self._condition(states[0], branch, embeds)
        for state in states:
            state.cond = dict(conds)
            state.prompt_tokens = conds[COND].row.lengths[0]
            state.dropped_tokens = {field: count for field, count in dropped.items() if count}
        return states

    def _state(self, request: Request, output: int, seed: int) -> State:
        """Noise comes from a generator on the CPU: a seed means the same noise on any device and in any batch."""
        grid = Grid(height=request.height // self.size_multiple, width=request.width // self.size_multiple, patch=PATCH)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.vae.config.z_dim, 1, PATCH * grid.height, PATCH * grid.width)
        noise = torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device)
        config = self.checkpoint.configs["scheduler"]
        sigmas = np.linspace(1.0, 1 / request.steps, request.steps).tolist()
        levels = Levels(steps=request.steps, sigmas=sigmas, mu=dynamic_shift(config, grid.tokens))
        return State(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=grid.pack(noise),
            grid=grid,
            schedule=Schedule(config, levels, device=self.device),
            guidance=request.guidance,
        )

    def _encode(self, text: str) -> tuple[Tensor, int]:
        """Hidden states of the prompt's tokens [T, C], and how many tokens did not fit.

        The encoder is causal, so cutting its input is the same as cutting its output.
        """
        tokens = self.tokenizer(PREFIX + text + SUFFIX).input_ids
        kept = tokens[: PREFIX_TOKENS + self.checkpoint.limits.max_prompt_tokens]
        hidden = self.text_encoder(torch.tensor([kept], device=self.device), use_cache=False).last_hidden_state
        return hidden[0, PREFIX_TOKENS:], len(tokens) - len(kept)

    def _condition(self, state: State, branch: str, embeds: Tensor) -> Conditioning:
        row = Row.of(txt=len(embeds), img=state.grid.tokens)
        with alone(state, branch, row):
            txt = self.transformer.text(embeds)
            tables = self._tables.get(state, lambda: self._modulation(state))
        rope = self.transformer.rope(len(embeds), state.grid.height, state.grid.width)
        return Conditioning(row=row, constants={"txt": ("txt", txt), "rope": (JOINT, rope)}, tables=tables)

    def _modulation(self, state: State) -> dict[str, Tensor]:
        """The modulation of every step, each at one level."""
        t = torch.tensor(state.schedule.timesteps, device=self.device).to(self.dtype) / 1000
        return {name: table[:, None] for name, table in self.transformer.modulation(t).items()}

    def predict(self, batch: Rows) -> Tensor:
        with activate(batch):
            velocity: Tensor = self.transformer(batch["latents"], batch)
        return velocity

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        mean, std = (
            torch.tensor(values, device=self.device, dtype=self.dtype).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        pixels = self.vae.decode(state.grid.unpack(latents)[None] / (1 / std) + mean, return_dict=False)[0]
        return [self.checkpoint.spec.postprocess(pixels[0, :, 0])]
