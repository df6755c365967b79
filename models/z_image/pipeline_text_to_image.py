"""Z-Image, text to image: what happens before, around and after the denoiser."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.z_image import PATCH
from omni_grpc.models.z_image.z_image_transformer import ZImageTransformer, padding
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import JOINT, Row, Rows
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.batch import alone
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.pipeline.state import COND, Conditioning, State, prompts
from omni_grpc.pipeline.tables import SharedTables
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import Guidance, Request
from omni_grpc.types.spec import Checkpoint


class ZImagePipeline(Pipeline):
    """Prompts become hidden states of Qwen3, noise becomes latents, latents become pixels in the VAE."""

    def __init__(
        self, checkpoint: Checkpoint, *, transformer: ZImageTransformer, text_encoder: Any, tokenizer: Any, vae: Any
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.vae = vae
        self.dtype = transformer.x_pad_token.dtype
        self.device = transformer.x_pad_token.device
        self.size_multiple = checkpoint.limits.size_multiple
        self._tables = SharedTables()

    @classmethod
    def load(cls, loader: Loader) -> Self:
        tokenizer = loader.tokenizer("tokenizer")
        if tokenizer.chat_template is None:
            raise CheckpointError("tokenizer: it has no chat template, which the prompt is put into")
        return cls(
            loader.checkpoint,
            transformer=loader.denoiser("transformer", ZImageTransformer.from_config),
            text_encoder=loader.module("text_encoder"),
            tokenizer=tokenizer,
            vae=loader.module("vae"),
        )

    def prepare(self, request: Request) -> list[State]:
        states = [self._state(request, output, seed) for output, seed in enumerate(request.seeds)]
        conds, tokens, dropped = {}, {}, {}
        for field, (branch, text) in prompts(request).items():
            embeds, dropped[field] = self._encode(text)
            tokens[branch] = len(embeds)
            conds[branch] = self._condition(states[0], branch, embeds)
        for state in states:
            state.cond = dict(conds)
            state.prompt_tokens = tokens[COND]
            state.dropped_tokens = {field: count for field, count in dropped.items() if count}
        return states

    def _state(self, request: Request, output: int, seed: int) -> State:
        """Noise comes from a generator on the CPU: a seed means the same noise on any device and in any batch.

        Latents are float32 in every step, whatever the dtype of the weights.
        """
        height, width = request.height // self.size_multiple, request.width // self.size_multiple
        grid = Grid(height=height, width=width, patch=PATCH, channels_last=True)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.transformer.latent_channels, 1, PATCH * height, PATCH * width)
        latents = grid.pack(torch.randn(shape, generator=generator).to(self.device))
        filling = padding(grid.tokens)
        config = self.checkpoint.configs["scheduler"]
        sigmas = torch.linspace(1.0, 1 / request.steps, request.steps).tolist()
        levels = Levels(steps=request.steps, sigmas=sigmas, mu=dynamic_shift(config, grid.tokens))
        return State(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=latents,
            # only their number counts: the denoiser puts its own tokens in their place
            context=latents.new_zeros(filling, latents.shape[1]) if filling else None,
            grid=grid,
            schedule=Schedule(config, levels, device=self.device),
            guidance=request.guidance,
        )

    def _encode(self, text: str) -> tuple[Tensor, int]:
        """Hidden states of the prompt's tokens [T, C] before the last layer, and how many tokens did not fit.

        The encoder is causal, so cutting its input is the same as cutting its output.
        """
        messages = [{"role": "user", "content": text}]
        chat = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        tokens = self.tokenizer(chat).input_ids
        kept = torch.tensor([tokens[: self.checkpoint.limits.max_prompt_tokens]], device=self.device)
        hidden = self.text_encoder(kept, output_hidden_states=True, use_cache=False).hidden_states[-2]
        return hidden[0], len(tokens) - kept.shape[1]

    def _condition(self, state: State, branch: str, embeds: Tensor) -> Conditioning:
        grid, text = state.grid, len(embeds) + padding(len(embeds))
        row = Row.of(txt=text, img=grid.tokens + padding(grid.tokens))
        rope = self.transformer.rope(text, grid.height, grid.width)
        with alone(state, branch, row) as rows:
            txt = self.transformer.text(embeds, rope[:text], rows)
            tables = self._tables.get(state, lambda: self._modulation(state))
        pad = torch.arange(row.lengths[1], device=self.device)[:, None] >= grid.tokens
        constants = {"txt": ("txt", txt), "pad": ("img", pad), "rope": (JOINT, rope), "rope_img": ("img", rope[text:])}
        return Conditioning(row=row, constants=constants, tables=tables)

    def _modulation(self, state: State) -> dict[str, Tensor]:
        """The modulation of every step, each at one level."""
        t = (1000 - torch.tensor(state.schedule.timesteps, device=self.device)) / 1000
        return {name: table[:, None] for name, table in self.transformer.modulation(t).items()}

    def predict(self, batch: Rows) -> Tensor:
        with activate(batch):
            velocity: Tensor = self.transformer(batch["latents"].to(self.dtype), batch)
        return -velocity.float()

    def guidance(self, state: State) -> Guidance:
        """This family writes cond + g * (cond - uncond), which is a scale of 1 + g in the usual form."""
        return dataclasses.replace(state.guidance, true_cfg_scale=1 + state.guidance.true_cfg_scale)

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        scaled = state.grid.unpack(latents)[None, :, 0].to(self.dtype)
        scaled = scaled / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return [self.checkpoint.spec.postprocess(self.vae.decode(scaled, return_dict=False)[0][0])]
