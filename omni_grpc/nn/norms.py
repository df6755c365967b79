"""Norms: the one after the last block, and those that blocks have besides the modulated ones of `ops.norm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import MOD
from omni_grpc.ops.norm import norm_modulate


class FinalNorm(nn.Module):
    """The norm after the last block: LayerNorm without affine, modulated by (scale, shift) of the timestep."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.linear = Linear(channels, 2 * channels, stream=MOD)

    def modulation(self, temb: Tensor) -> Tensor:
        """silu(timestep embedding) [S, C] -> [S, 2C]."""
        out: Tensor = self.linear(temb)
        return out

    def forward(self, x: Tensor, mod: Tensor, index: Tensor) -> Tensor:
        """x [T, C], mod [M, 2C], index int32 [T] -> [T, C]."""
        scale, shift = mod.chunk(2, -1)
        return norm_modulate(x, scale, shift, index, self.eps)


class AcrossHeadsNorm(nn.Module):
    """RMSNorm of queries or keys over all heads at once: x [T, heads * head_size] -> the same.

    It has a class of its own, because a feature that spreads heads over ranks has to sum the squares of all of them.
    """

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, heads * head_size] -> the same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Float32LayerNorm(nn.Module):
    """LayerNorm with affine, computed in float32 whatever the dtype of x and of the weights: [T, C] in x's dtype."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, C] -> [T, C] in x's dtype."""
        return norm_modulate(x, None, None, None, self.eps, weight=self.weight, bias=self.bias)
