"""FLUX.1: text to image, and edits of a picture with Kontext."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.flux import PATCH
from omni_grpc.models.flux.flux_transformer import FluxTransformer
from omni_grpc.nn.rows import JOINT, Rows
from omni_grpc.pipeline.image import ImagePipeline
from omni_grpc.pipeline.latent_diffusion import Constants
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.text_encoders import PaddedTextEncoder, PromptEmbeds
from omni_grpc.pipeline.vae import ImageVae
from omni_grpc.types.request import Guidance


class FluxPipeline(ImagePipeline):
    """A prompt is read twice: T5 (`text_encoder_2`) makes the text tokens, CLIP one vector that modulates the blocks.

    Prompts are padded to their longest length: the models were trained with the padding of T5 in view, and see it.
    """

    transformer: FluxTransformer
    text_encoder: PaddedTextEncoder
    text_encoder_2: PaddedTextEncoder
    patch = PATCH

    @classmethod
    def load(cls, loader: Loader) -> Self:
        clip, t5 = loader.tokenizer("tokenizer"), loader.tokenizer("tokenizer_2")
        length = loader.checkpoint.limits.max_prompt_tokens
        return cls(
            loader,
            transformer=loader.denoiser("transformer", FluxTransformer.from_config),
            text_encoder=PaddedTextEncoder(loader.module("text_encoder"), clip, clip.model_max_length),
            text_encoder_2=PaddedTextEncoder(loader.module("text_encoder_2"), t5, length),
            vae=ImageVae(loader.module("vae")),
        )

    def encode_prompt(self, prompt: str) -> PromptEmbeds:
        embeds: PromptEmbeds = self.text_encoder_2(prompt)
        return dataclasses.replace(embeds, pooled=self.text_encoder(prompt).pooled)

    def constants(self, prompt: PromptEmbeds, grids: Sequence[Grid], rows: Rows) -> Constants:
        rope = self.transformer.rope(len(prompt.hidden), *((grid.height, grid.width) for grid in grids))
        return {"txt": ("txt", self.transformer.text(prompt.hidden)), "rope": (JOINT, rope)}

    def modulation(self, t: Tensor, prompt: PromptEmbeds, guidance: Guidance) -> Mapping[str, Tensor]:
        """t [S] -> tables [S, ...]. They depend on CLIP's pooled vector and the embedded guidance scale too."""
        assert prompt.pooled is not None
        return self.transformer.modulation(t.to(self.dtype) / 1000, prompt.pooled, guidance.scale)
