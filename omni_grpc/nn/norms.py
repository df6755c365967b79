"""Norms that are modulated by the timestep."""

from __future__ import annotations

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
