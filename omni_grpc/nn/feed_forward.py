"""The feed-forward half of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.linear import Linear


class FeedForward(nn.Module):
    """Linear, GELU (tanh approximation), Linear: x [T, C] -> [T, C]."""

    def __init__(self, channels: int, hidden: int, *, stream: str) -> None:
        super().__init__()
        self.up = Linear(channels, hidden, stream=stream)
        self.down = Linear(hidden, channels, stream=stream)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out
