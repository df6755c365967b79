"""The transformer of Qwen-Image: embedders, one stack of dual-stream blocks, projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.dual_stream import IMG, TXT, DualStreamBlock
from omni_grpc.nn.embeddings import TimestepEmbedding
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.norms import FinalNorm
from omni_grpc.nn.rope import rope_table
from omni_grpc.nn.row_changes import normed
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.types.spec import check_config

SERVED: Mapping[str, bool] = {
    "guidance_embeds": False,
    "zero_cond_t": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
}
"""Settings that other members of the family turn on, and the values that are served."""


class QwenImageTransformer(nn.Module):
    """Predicts the velocity of the latents' tokens.

    What does not depend on the latents is computed once per request by `text`, `rope` and `modulation`, and is bound to
    the rows: "txt" [T_txt, C], "rope" [T_joint, D / 2, 2], "dual" [M, blocks, 12C] and "final" [M, 2C].
    """

    row_parameters = ("txt_norm",)

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        text_channels: int,
        in_channels: int,
        out_channels: int,
        axes: Sequence[int],
    ) -> None:
        super().__init__()
        channels = num_heads * head_size
        self.axes = tuple(axes)
        self.time_text_embed = TimestepEmbedding(channels)
        self.txt_norm = nn.RMSNorm(text_channels, eps=1e-6)
        self.img_in = Linear(in_channels, channels, stream=IMG)
        self.txt_in = Linear(text_channels, channels, stream=TXT)
        self.stack = Stack(dual=[DualStreamBlock(num_heads, head_size) for _ in range(num_layers)])
        self.norm_out = FinalNorm(channels)
        self.proj_out = Linear(channels, out_channels, stream=IMG)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the checkpoint's own transformer config. Raises CheckpointError for a variant that is not served yet."""
        check_config(config, SERVED)
        return cls(
            num_layers=config["num_layers"],
            num_heads=config["num_attention_heads"],
            head_size=config["attention_head_dim"],
            text_channels=config["joint_attention_dim"],
            in_channels=config["in_channels"],
            out_channels=config["patch_size"] ** 2 * (config["out_channels"] or config["in_channels"]),
            axes=config["axes_dims_rope"],
        )

    def text(self, embeds: Tensor) -> Tensor:
        """Hidden states of the text encoder [T_txt, text_channels] -> the text tokens [T_txt, C]."""
        out: Tensor = self.txt_in(normed(self.txt_norm, embeds, TXT))
        return out

    def rope(self, text_tokens: int, height: int, width: int) -> Tensor:
        """RoPE tables of a row, [T_txt + height * width, D / 2, 2]; height and width in tokens.

        Positions are (frame, y, x). The image is centered on 0. Text continues along the diagonal where the image ends.
        """
        device = self.proj_out.weight.device
        y, x = (torch.arange(size, device=device) - (size - size // 2) for size in (height, width))
        image = torch.cartesian_prod(torch.zeros(1, dtype=torch.long, device=device), y, x)
        text = max(height // 2, width // 2) + torch.arange(text_tokens, device=device)
        return rope_table(torch.cat([text[:, None].expand(-1, 3), image]), self.axes)

    def modulation(self, t: Tensor) -> dict[str, Tensor]:
        """Timesteps [S] in 0..1 -> the modulation vectors of all blocks by name, [S, ...] each."""
        temb = F.silu(self.time_text_embed(t))
        return {**self.stack.modulation(temb), "final": self.norm_out.modulation(temb)}

    def forward(self, latents: Tensor, rows: Rows) -> Tensor:
        """[T_img, in_channels] -> [T_img, out_channels]."""
        img = self.stack({TXT: rows["txt"], IMG: self.img_in(latents)}, rows)[IMG]
        out: Tensor = self.proj_out(self.norm_out(img, rows["final"], rows.index[IMG]))
        return out
