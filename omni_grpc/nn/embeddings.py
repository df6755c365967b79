"""Embeddings of scalars: the timestep, and what other numbers a model is told."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import MOD


def sinusoid(t: Tensor, channels: int = 256, scale: float = 1000.0, max_period: float = 10_000.0) -> Tensor:
    """t [S] -> float32 [S, channels]: cosines, then sines, of `scale * t` at frequencies from 1 down to 1 / max_period.

    This is the embedding of DDPM (https://arxiv.org/abs/2006.11239) as diffusers computes it: the frequencies are
    rounded to t's dtype.
    """
    half = channels // 2
    exponents = -math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half
    angles = scale * (t[:, None].float() * exponents.exp().to(t.dtype)[None])
    return torch.cat([angles.cos(), angles.sin()], -1)


class ScalarEmbedder(nn.Module):
    """Linear, SiLU, Linear: [S, in] -> [S, out]."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear_1 = Linear(in_channels, out_channels, stream=MOD)
        self.linear_2 = Linear(out_channels, out_channels, stream=MOD)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, in] -> [S, out]."""
        out: Tensor = self.linear_2(F.silu(self.linear_1(x)))
        return out


class TimestepEmbedding(nn.Module):
    """t [S], in 0..1 -> the timestep's embedding [S, channels] in t's dtype."""

    def __init__(self, channels: int, frequencies: int = 256) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.timestep_embedder = ScalarEmbedder(frequencies, channels)

    def forward(self, t: Tensor) -> Tensor:
        """t [S] -> [S, channels] in t's dtype."""
        out: Tensor = self.timestep_embedder(sinusoid(t, self.frequencies).to(t.dtype))
        return out
