"""Rows that come out the same, to the bit, in any batch: a product of full precision is computed row by row.

torch's libraries choose a kernel by the number of tokens, and with it the order in which a sum is added up. Layers that
work in codes have one way for any number of tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from omni_grpc.config import ModelConfig
from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, active

__all__ = ["apply"]


def apply(module: nn.Module, config: ModelConfig, context: Context) -> None:
    """Wraps every linear layer in full precision. It comes before what wraps layers too."""
    layers = [(path, part) for path, part in module.named_modules() if isinstance(part, AnyLinear)]
    for path, linear in layers:
        if linear.activation_dtype is None:
            module.set_submodule(path, RowwiseLinear(linear))
    context.effects.report(batch_invariant=True)


class RowwiseLinear(AnyLinear):
    """The layer inside, for one row of the batch after the other."""

    def __init__(self, base: AnyLinear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream

    @property
    def weight(self) -> Tensor:
        """That of the layer inside: models ask their layers for dtype and device."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return self._by_row(self.base, x)

    def gelu(self, x: Tensor) -> Tensor:
        return self._by_row(self.base.gelu, x)

    def _by_row(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = active.get()
        if len(rows) == 1:
            return compute(x)
        return torch.cat([compute(part) for part in rows.stream(self.stream).split(x)])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def take(self, name: str, tensor: Tensor) -> None:
        self.base.take(name, tensor)

    def room(self, name: str, dtype: torch.dtype) -> Tensor | None:
        return self.base.room(name, dtype)
