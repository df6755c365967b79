"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from omni_grpc.nn.activations import Activation, for_readers, gelu, silu_gate
from omni_grpc.nn.linear import AnyLinear, Linear


class FeedForward(nn.Module):
    """Linear, GELU (tanh approximation), Linear: x [T, C] -> [T, C]."""

    def __init__(self, channels: int, hidden: int, *, stream: str) -> None:
        super().__init__()
        self.up: AnyLinear = Linear(channels, hidden, stream=stream)
        self.down: AnyLinear = Linear(hidden, channels, stream=stream)

    @property
    def readers(self) -> tuple[AnyLinear, ...]:
        """The layers that read its input."""
        return (self.up,)

    def forward(self, x: Activation) -> Tensor:
        out: Tensor = self.down(gelu(self.up, x, (self.down,)))
        return out


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x) (https://arxiv.org/abs/2002.05202, eq. 6), without biases: x [T, C] -> [T, C]."""

    def __init__(self, channels: int, hidden: int, *, stream: str) -> None:
        super().__init__()
        self.w1: AnyLinear = Linear(channels, hidden, bias=False, stream=stream)
        self.w2: AnyLinear = Linear(hidden, channels, bias=False, stream=stream)
        self.w3: AnyLinear = Linear(channels, hidden, bias=False, stream=stream)

    @property
    def readers(self) -> tuple[AnyLinear, ...]:
        """The layers that read its input."""
        return self.w1, self.w3

    def forward(self, x: Activation) -> Tensor:
        x = for_readers(x, self.readers)
        out: Tensor = self.w2(silu_gate(self.w1(x), self.w3(x), (self.w2,)))
        return out
