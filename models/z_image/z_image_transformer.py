"""The transformer of Z-Image: refiners for text and for image, one stack of blocks over both, projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.models.z_image import PATCH
from omni_grpc.nn.dual_stream import IMG, TXT
from omni_grpc.nn.embeddings import sinusoid
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rope import rope_table
from omni_grpc.nn.rows import MOD, Rows
from omni_grpc.nn.single_stream import SingleStreamBlock
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.norm import norm_modulate
from omni_grpc.types.spec import check_config

SERVED: Mapping[str, Any] = {
    "all_patch_size": [PATCH],
    "all_f_patch_size": [1],
    "qk_norm": True,
    "siglip_feat_dim": None,
}
"""Settings that other members of the family change, and the values that are served."""

MULTIPLE = 32
"""Text and image are each padded to a multiple of this with learned tokens, which are attended like all others."""

TIME_CHANNELS = 256
"""Channels of the timestep embedding at most, and of the sinusoid that it is made from."""
TIME_HIDDEN = 1024


def padding(tokens: int) -> int:
    """How many padding tokens follow so many tokens."""
    return -tokens % MULTIPLE


class FinalLayer(nn.Module):
    """LayerNorm without affine, scaled by the timestep; then the projection to latents."""

    def __init__(self, channels: int, temb_channels: int, out_channels: int) -> None:
        super().__init__()
        self.adaLN_modulation = Linear(temb_channels, channels, stream=MOD)
        self.linear = Linear(channels, out_channels, stream=IMG)

    def modulation(self, temb: Tensor) -> Tensor:
        """[S, temb_channels] -> [S, C]. Here, and only here, the embedding goes through SiLU."""
        out: Tensor = self.adaLN_modulation(F.silu(temb))
        return out

    def forward(self, x: Tensor, scale: Tensor, index: Tensor) -> Tensor:
        """x [T, C], scale [M, C], index int32 [T] -> velocity tokens [T, out_channels]."""
        out: Tensor = self.linear(norm_modulate(x, scale, torch.zeros_like(scale), index, 1e-6))
        return out


class ZImageTransformer(nn.Module):
    """Predicts the velocity of the latents' tokens, from noise to image: the opposite sign of the schedulers'.

    What does not depend on the latents is computed once per request by `text`, `rope` and `modulation`, and is bound to
    the rows: "txt" [T_txt, C], "pad" bool [T_img, 1] (which tokens are padding), "rope" [T_joint, D / 2, 2],
    "rope_img" [T_img, D / 2, 2], "noise" and "single" [M, blocks, 4C], "final" [M, C].
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_refiners: int,
        num_heads: int,
        channels: int,
        text_channels: int,
        latent_channels: int,
        axes: Sequence[int],
        theta: float,
        t_scale: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.latent_channels = latent_channels
        self.axes = tuple(axes)
        self.theta = theta
        self.t_scale = t_scale
        head_size, hidden = channels // num_heads, int(channels / 3 * 8)
        token, temb_channels = PATCH**2 * latent_channels, min(channels, TIME_CHANNELS)

        def blocks(count: int, stream: str, temb: int | None = temb_channels) -> list[SingleStreamBlock]:
            return [SingleStreamBlock(num_heads, head_size, hidden, temb, stream=stream, eps=eps) for _ in range(count)]

        self.t_embedder = nn.Sequential(
            Linear(TIME_CHANNELS, TIME_HIDDEN, stream=MOD), nn.SiLU(), Linear(TIME_HIDDEN, temb_channels, stream=MOD)
        )
        self.x_embedder = Linear(token, channels, stream=IMG)
        self.cap_embedder = nn.Sequential(nn.RMSNorm(text_channels, eps), Linear(text_channels, channels, stream=TXT))
        self.x_pad_token = nn.Parameter(torch.zeros(1, channels))
        self.cap_pad_token = nn.Parameter(torch.zeros(1, channels))
        self.noise_refiner = Stack(noise=blocks(num_refiners, IMG))
        self.context_refiner = Stack(context=blocks(num_refiners, TXT, None))
        self.stack = Stack(single=blocks(num_layers, "joint"))
        self.final_layer = FinalLayer(channels, temb_channels, token)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the checkpoint's own transformer config. Raises CheckpointError for a variant that is not served yet."""
        check_config(config, {**SERVED, "n_kv_heads": config["n_heads"]})
        return cls(
            num_layers=config["n_layers"],
            num_refiners=config["n_refiner_layers"],
            num_heads=config["n_heads"],
            channels=config["dim"],
            text_channels=config["cap_feat_dim"],
            latent_channels=config["in_channels"],
            axes=config["axes_dims"],
            theta=config["rope_theta"],
            t_scale=config["t_scale"],
            eps=config["norm_eps"],
        )

    def text(self, embeds: Tensor, rope: Tensor, rows: Rows) -> Tensor:
        """Hidden states of the text encoder [T, text_channels] -> the text tokens, padded and refined, [T_txt, C].

        rope: [T_txt, D / 2, 2]. rows: a batch of the row of this text alone.
        """
        txt = torch.cat([self.cap_embedder(embeds), self.cap_pad_token.expand(padding(len(embeds)), -1)])
        rows.bind("rope_txt", TXT, [rope])
        for name, ones in self.context_refiner.modulation(txt[:1]).items():
            rows.bind(name, MOD, [ones])
        refined: Tensor = self.context_refiner({TXT: txt}, rows)[TXT]
        return refined

    def rope(self, text: int, height: int, width: int) -> Tensor:
        """RoPE tables of a row, [T_txt + T_img, D / 2, 2]. text: tokens with padding; height and width in tokens.

        Positions are (time, y, x). Text runs along the first axis from 1, and so does its padding; the image follows
        it. The padding of the image is at (0, 0, 0).
        """
        device = self.x_pad_token.device
        along = torch.arange(1, text + 1, device=device)
        grid = (torch.arange(size, device=device) for size in (height, width))
        image = torch.cartesian_prod(torch.tensor([text + 1], device=device), *grid)
        positions = torch.cat([F.pad(along[:, None], (0, 2)), image])
        positions = F.pad(positions, (0, 0, 0, padding(height * width)))
        return rope_table(positions, self.axes, self.theta, torch.float64)

    def modulation(self, t: Tensor) -> dict[str, Tensor]:
        """Timesteps float32 [S] from 0 (noise) to 1 -> the modulation vectors of all blocks by name, [S, ...] each."""
        frequencies = sinusoid(t * self.t_scale, TIME_CHANNELS, scale=1.0).to(self.x_pad_token.dtype)
        temb = self.t_embedder(frequencies)
        tables = {**self.noise_refiner.modulation(temb), **self.stack.modulation(temb)}
        return {**tables, "final": self.final_layer.modulation(temb)}

    def forward(self, latents: Tensor, rows: Rows) -> Tensor:
        """[T_img, patch * patch * latent_channels] -> the same shape."""
        img = torch.where(rows["pad"], self.x_pad_token, self.x_embedder(latents))
        img = self.noise_refiner({IMG: img}, rows)[IMG]
        img = self.stack({TXT: rows["txt"], IMG: img}, rows)[IMG]
        out: Tensor = self.final_layer(img, rows["final"], rows.index[IMG])
        return out
