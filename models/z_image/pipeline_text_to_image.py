"""Z-Image: text to image."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.z_image import PATCH
from omni_grpc.models.z_image.z_image_transformer import ZImageTransformer, padding
from omni_grpc.nn.rows import JOINT, Row, Rows
from omni_grpc.pipeline.image import ImagePipeline, Reference
from omni_grpc.pipeline.latent_diffusion import Constants
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels
from omni_grpc.pipeline.state import State
from omni_grpc.pipeline.text_encoders import CausalTextEncoder, PromptEmbeds
from omni_grpc.pipeline.vae import ImageVae
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import Guidance, Request


class ZImagePipeline(ImagePipeline):
    """Prompts are encoded by Qwen3, up to its last layer but one. Latents stay in float32, whatever the dtype of the
    weights. Text and image are padded to multiples of 32 tokens, which are attended like others.
    """

    transformer: ZImageTransformer
    patch = PATCH
    latents_dtype = torch.float32

    @classmethod
    def load(cls, loader: Loader) -> Self:
        tokenizer = loader.tokenizer("tokenizer")
        if tokenizer.chat_template is None:
            raise CheckpointError("tokenizer: it has no chat template, which the prompt is put into")

        def chat(prompt: str) -> str:
            messages: list[Any] = [{"role": "user", "content": prompt}]
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
            )
            return text

        return cls(
            loader,
            transformer=loader.denoiser("transformer", ZImageTransformer.from_config),
            text_encoder=CausalTextEncoder(
                loader.module("text_encoder"),
                tokenizer,
                template=chat,
                max_tokens=loader.checkpoint.limits.max_prompt_tokens,
                layers=(-2,),
            ),
            vae=ImageVae(loader.module("vae")),
        )

    def grid(self, width: int, height: int, num_frames: int | None = None) -> Grid:
        return dataclasses.replace(super().grid(width, height), channels_last=True)

    def levels(self, request: Request, grid: Grid) -> Levels:
        """The usual ones, with torch's rounding."""
        sigmas = torch.linspace(1.0, 1 / request.steps, request.steps).tolist()
        return dataclasses.replace(super().levels(request, grid), sigmas=sigmas)

    def row(self, prompt: PromptEmbeds, grids: Sequence[Grid]) -> Row:
        text, (grid,) = len(prompt.hidden), grids
        return Row.of(txt=text + padding(text), img=grid.tokens + padding(grid.tokens))

    def context(self, grid: Grid, references: Sequence[Reference]) -> Tensor | None:
        """The image's padding. Only its length counts: the denoiser puts its own tokens there."""
        filling, channels = padding(grid.tokens), self.vae.channels * PATCH**2
        return torch.zeros(filling, channels, device=self.device) if filling else None

    def constants(self, prompt: PromptEmbeds, grids: Sequence[Grid], rows: Rows) -> Constants:
        (grid,), text, image = grids, rows.stream("txt").total, rows.stream("img").total
        rope = self.transformer.rope(text, grid.height, grid.width)
        txt = self.transformer.text(prompt.hidden, rope[:text], rows)
        pad = torch.arange(image, device=self.device)[:, None] >= grid.tokens
        return {"txt": ("txt", txt), "pad": ("img", pad), "rope": (JOINT, rope), "rope_img": ("img", rope[text:])}

    def modulation(self, t: Tensor, prompt: PromptEmbeds, guidance: Guidance) -> Mapping[str, Tensor]:
        """t [S] -> tables [S, ...]. The model's time runs from 0 (noise) to 1."""
        return self.transformer.modulation((1000 - t) / 1000)

    def predict(self, batch: Rows) -> Tensor:
        """The model predicts the velocity from noise to image, the schedulers expect the opposite."""
        return -super().predict(batch).float()

    def guidance(self, state: State) -> Guidance:
        """This family writes cond + g * (cond - uncond), which is a scale of 1 + g in the usual form."""
        return dataclasses.replace(state.guidance, true_cfg_scale=1 + state.guidance.true_cfg_scale)
