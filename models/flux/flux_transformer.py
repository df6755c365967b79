"""The transformer of FLUX.1: embedders, one stack of dual-stream and then single-stream blocks, projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.models.flux import AXES, PATCH
from omni_grpc.nn.dual_stream import IMG, TXT, DualStreamBlock
from omni_grpc.nn.embeddings import ScalarEmbedder, sinusoid
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.norms import FinalNorm
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rope import rope_table
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.types.errors import CheckpointError


class Embedding(nn.Module):
    """The embedding that modulates the blocks: the sum of those of the timestep, of the pooled prompt and, in
    guidance-distilled models, of the guidance scale.
    """

    FREQUENCIES = 256

    def __init__(self, channels: int, pooled_channels: int, *, with_guidance: bool) -> None:
        super().__init__()
        self.timestep_embedder = ScalarEmbedder(self.FREQUENCIES, channels)
        self.guidance_embedder = ScalarEmbedder(self.FREQUENCIES, channels) if with_guidance else None
        self.text_embedder = ScalarEmbedder(pooled_channels, channels)

    def forward(self, t: Tensor, pooled: Tensor, scale: float | None) -> Tensor:
        """t [S], in 0..1; pooled [1, pooled_channels] -> [S, channels], all in the dtype of t."""
        out = self.timestep_embedder(self._frequencies(t))
        if self.guidance_embedder is not None:
            out = out + self.guidance_embedder(self._frequencies(t.new_tensor([scale])))
        embedding: Tensor = out + self.text_embedder(pooled)
        return embedding

    def _frequencies(self, x: Tensor) -> Tensor:
        # 1000 x is rounded to the model's dtype, then embedded in float32: the rounding is part of the model
        return sinusoid((1000 * x).float(), self.FREQUENCIES, scale=1.0).to(x.dtype)


class FluxTransformer(nn.Module):
    """Predicts the velocity of the latents' tokens.

    What does not depend on the latents is computed once per request by `text`, `rope` and `modulation`, and is bound to
    the rows: "txt" [T_txt, C], "rope" [T_joint, D / 2, 2], "dual" [M, blocks, 12C], "single" [M, blocks,
    3C] and "final" [M, 2C].
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        heads, size = config["num_attention_heads"], config["attention_head_dim"]
        channels = heads * size
        # published configs leave out settings with the usual value
        self.axes = tuple(config.get("axes_dims_rope", AXES))
        self.time_text_embed = Embedding(
            channels, config["pooled_projection_dim"], with_guidance=config.get("guidance_embeds", False)
        )
        self.context_embedder = Linear(config["joint_attention_dim"], channels, stream=TXT)
        self.x_embedder = Linear(config["in_channels"], channels, stream=IMG)
        self.stack = Stack(
            dual=[DualStreamBlock(heads, size) for _ in range(config["num_layers"])],
            single=[ParallelSingleBlock(heads, size) for _ in range(config["num_single_layers"])],
        )
        self.norm_out = FinalNorm(channels)
        self.proj_out = Linear(channels, config.get("out_channels") or config["in_channels"], stream=IMG)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the checkpoint's own transformer config. Raises CheckpointError for a variant that is not served."""
        if (patch := config.get("patch_size", 1)) != 1:
            raise CheckpointError(
                f"transformer: patch_size = {patch} is not served; the pipeline packs {PATCH} x {PATCH} latents itself"
            )
        channels = config["in_channels"]
        if (out := config.get("out_channels") or channels) != channels:
            raise CheckpointError(
                f"transformer: in_channels = {channels} with out_channels = {out} is not served; "
                "there is nothing to put into the other channels"
            )
        return cls(config)

    def text(self, embeds: Tensor) -> Tensor:
        """Hidden states of T5 [T_txt, text_channels] -> the text tokens [T_txt, C]."""
        out: Tensor = self.context_embedder(embeds)
        return out

    def rope(self, text_tokens: int, *pictures: tuple[int, int]) -> Tensor:
        """RoPE tables of a row, [T_txt + tokens of the images, D / 2, 2]. pictures: height and width in tokens, of the
        output and then of the references.

        Positions are (frame, y, x). Text is at (0, 0, 0). The output is frame 0, references are frames 1, 2, ...
        """
        device = self.proj_out.weight.device
        positions = [torch.zeros(text_tokens, 3, dtype=torch.long, device=device)]
        for frame, (height, width) in enumerate(pictures):
            y, x = (torch.arange(size, device=device) for size in (height, width))
            positions.append(torch.cartesian_prod(torch.tensor([frame], device=device), y, x))
        return rope_table(torch.cat(positions), self.axes, dtype=torch.float64)

    def modulation(self, t: Tensor, pooled: Tensor, scale: float | None) -> dict[str, Tensor]:
        """Timesteps [S] in 0..1, pooled prompt [1, pooled_channels] and embedded guidance scale (None for a model
        without one) -> the modulation vectors of all blocks by name, [S, ...] each.
        """
        temb = F.silu(self.time_text_embed(t, pooled, scale))
        return {**self.stack.modulation(temb), "final": self.norm_out.modulation(temb)}

    def forward(self, latents: Tensor, rows: Rows) -> Tensor:
        """[T_img, in_channels] -> [T_img, in_channels]."""
        img = self.stack({TXT: rows["txt"], IMG: self.x_embedder(latents)}, rows)[IMG]
        out: Tensor = self.proj_out(self.norm_out(img, rows["final"], rows.index[IMG]))
        return out
