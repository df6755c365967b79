"""Qwen-Image: text to image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.qwen_image import PATCH
from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from omni_grpc.nn.rows import JOINT, Rows
from omni_grpc.pipeline.image import ImagePipeline
from omni_grpc.pipeline.latent_diffusion import Constants
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.text_encoders import CausalTextEncoder, PromptEmbeds
from omni_grpc.pipeline.vae import CausalVae
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import Guidance

PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34


class QwenImagePipeline(ImagePipeline):
    """Prompts are encoded by the language model of Qwen2.5-VL, within a template whose beginning is dropped."""

    transformer: QwenImageTransformer
    patch = PATCH

    @classmethod
    def load(cls, loader: Loader) -> Self:
        tokenizer = loader.tokenizer("tokenizer")
        if (found := len(tokenizer(PREFIX).input_ids)) != PREFIX_TOKENS:
            raise CheckpointError(
                f"tokenizer: the prompt template starts with {found} tokens, expected {PREFIX_TOKENS}"
            )
        return cls(
            loader,
            transformer=loader.denoiser("transformer", QwenImageTransformer.from_config),
            text_encoder=CausalTextEncoder(
                # neither the vision tower nor the language model's head is read
                loader.module("text_encoder", part="model.language_model"),
                tokenizer,
                template=lambda prompt: PREFIX + prompt + SUFFIX,
                prefix=PREFIX_TOKENS,
                max_tokens=loader.checkpoint.limits.max_prompt_tokens,
            ),
            vae=CausalVae(loader.module("vae")),
        )

    def constants(self, prompt: PromptEmbeds, grids: Sequence[Grid], rows: Rows) -> Constants:
        (grid,) = grids
        rope = self.transformer.rope(len(prompt.hidden), grid.height, grid.width)
        return {"txt": ("txt", self.transformer.text(prompt.hidden)), "rope": (JOINT, rope)}

    def modulation(self, t: Tensor, prompt: PromptEmbeds, guidance: Guidance) -> Mapping[str, Tensor]:
        """t [S] -> tables [S, ...]. They depend on the timesteps alone."""
        return self.transformer.modulation(t.to(self.dtype) / 1000)
