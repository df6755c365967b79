"""The transformer of Wan: patch embedding, one stack of blocks with self and cross attention, projection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from omni_grpc.nn.cross_dit import ConditionEmbedder, CrossDiTBlock, text_constants
from omni_grpc.nn.dual_stream import IMG
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rope import rope_table
from omni_grpc.nn.row_changes import table_of
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.norm import norm_modulate


class WanTransformer(nn.Module):
    """Predicts the velocity of the latents' tokens. Values within a token are ordered channel first, in and out.

    What does not depend on the latents is computed once per request by `text`, `rope` and `modulation`, and is bound to
    the rows: "text_k" and "text_v" [T_txt, blocks, H, D], "rope" [T_img, D / 2, 2], "blocks" [M, 1, 6C]
    and "final" [M, 2C].
    """

    row_parameters = ("scale_shift_table",)

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        ff_channels: int,
        in_channels: int,
        out_channels: int,
        patch: Sequence[int],
        frequencies: int,
        text_channels: int,
        eps: float,
    ) -> None:
        super().__init__()
        channels = num_heads * head_size
        # RoPE: height and width get a third of the head each, rounded down to pairs; time gets the rest
        side = 2 * (head_size // 6)
        self.axes = (head_size - 2 * side, side, side)
        self.out_channels = out_channels
        self.eps = eps
        self.patch_embedding = Linear(in_channels * math.prod(patch), channels, stream=IMG)
        self.condition_embedder = ConditionEmbedder(channels, frequencies=frequencies, text_channels=text_channels)
        self.stack = Stack(
            blocks=[CrossDiTBlock(num_heads, head_size, ff_channels, eps) for _ in range(num_layers)],
        )
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, channels))
        self.proj_out = Linear(channels, out_channels * math.prod(patch), stream=IMG)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the checkpoint's own transformer config."""
        return cls(
            num_layers=config["num_layers"],
            num_heads=config["num_attention_heads"],
            head_size=config["attention_head_dim"],
            ff_channels=config["ffn_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            patch=config["patch_size"],
            frequencies=config["freq_dim"],
            text_channels=config["text_dim"],
            eps=config["eps"],
        )

    def text(self, embeds: Tensor) -> dict[str, tuple[str, Tensor]]:
        """Hidden states of the text encoder [T_txt, text_channels] -> keys and values of every block, as constants."""
        blocks = cast(Sequence[CrossDiTBlock], self.stack.group("blocks"))
        return text_constants(blocks, self.condition_embedder.text_embedder(embeds))

    def rope(self, frames: int, height: int, width: int) -> Tensor:
        """RoPE tables of a video, [frames * height * width, D / 2, 2]; sizes in tokens, positions from 0."""
        device = self.scale_shift_table.device
        positions = torch.cartesian_prod(*(torch.arange(size, device=device) for size in (frames, height, width)))
        return rope_table(positions, self.axes, dtype=torch.float64)

    def modulation(self, t: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Timesteps float32 [S] in the scheduler's units -> modulation vectors by name, [S, ...] each. dtype: of the
        tokens.
        """
        temb, shared = self.condition_embedder.time(t, dtype)
        return {
            **self.stack.modulation(shared),
            "final": (table_of(self, "scale_shift_table") + temb[:, None]).flatten(1),
        }

    def forward(self, tokens: Tensor, rows: Rows) -> Tensor:
        """[T_img, in_channels * patch] -> [T_img, out_channels * patch]."""
        img = self.stack({IMG: self.patch_embedding(tokens)}, rows)[IMG]
        shift, scale = rows["final"].chunk(2, -1)
        patches = self.proj_out(norm_modulate(img, scale, shift, rows.index[IMG], self.eps))
        # proj_out orders values channel last; tokens are channel first
        out: Tensor = patches.unflatten(-1, (-1, self.out_channels)).transpose(1, 2).flatten(1)
        return out
