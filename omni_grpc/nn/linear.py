"""Linear: the seam that quantisation, tensor parallelism and LoRA replace or wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import nn

from omni_grpc.nn.rows import Rows

active: ContextVar[Rows] = ContextVar("active")
"""The rows being computed. Stack, predict and prepare set it; only per-row wrappers of Linear may read it."""


@contextlib.contextmanager
def activate(rows: Rows) -> Iterator[Rows]:
    """Makes `rows` the active ones for the length of the block."""
    token = active.set(rows)
    try:
        yield rows
    finally:
        active.reset(token)


class Linear(nn.Linear):
    """A linear layer that knows which packed tensor it eats: x [T, in] of `stream` -> [T, out].

    A wrapper that treats rows differently finds a row's tokens with `active.get().stream(self.stream)`. Lengths could
    not tell: two streams of a batch may be equally long.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, stream: str) -> None:
        super().__init__(in_features, out_features, bias)
        self.stream = stream

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stream={self.stream}"
