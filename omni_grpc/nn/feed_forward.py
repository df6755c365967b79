"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from omni_grpc.nn.linear import Linear
from omni_grpc.ops.quant import gelu_tanh, silu_mul


class FeedForward(nn.Module):
    """Linear, GELU (tanh approximation), Linear: x [T, C] -> [T, C]."""

    def __init__(self, channels: int, hidden: int, *, stream: str) -> None:
        super().__init__()
        self.up = Linear(channels, hidden, stream=stream)
        self.down = Linear(hidden, channels, stream=stream)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(gelu_tanh(self.up(x)))
        return out


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x) (https://arxiv.org/abs/2002.05202, eq. 6), without biases: x [T, C] -> [T, C]."""

    def __init__(self, channels: int, hidden: int, *, stream: str) -> None:
        super().__init__()
        self.w1 = Linear(channels, hidden, bias=False, stream=stream)
        self.w2 = Linear(hidden, channels, bias=False, stream=stream)
        self.w3 = Linear(channels, hidden, bias=False, stream=stream)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(silu_mul(self.w1(x), self.w3(x)))
        return out
