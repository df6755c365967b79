"""Batch invariance: a row gives the same bits in any batch, because linear layers in full precision are computed row by
row.

torch's libraries choose a GEMM kernel by the number of tokens, and with it the order of summation. Layers in 8 bits
have a kernel that does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from omni_grpc.config import ModelConfig
from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, active

__all__ = ["apply"]


def apply(module: nn.Module, config: ModelConfig, context: Context) -> None:
    """Wraps every linear layer in full precision. It has to be applied before other features that wrap layers."""
    found = [(path, part) for path, part in module.named_modules() if isinstance(part, AnyLinear)]
    # of layers within layers the innermost: ranks sum once for all rows
    layers = [(path, part) for path, part in found if not any(isinstance(c, AnyLinear) for c in part.children())]
    for path, linear in layers:
        if linear.activation_dtype is None:
            module.set_submodule(path, RowwiseLinear(linear))
    context.effects.report(batch_invariant=True)


class RowwiseLinear(AnyLinear):
    """Runs the layer inside for one row of the batch after the other."""

    def __init__(self, base: AnyLinear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream

    @property
    def weight(self) -> Tensor:
        """The weight of the layer inside: models ask their layers for dtype and device."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], with one call of the wrapped layer per row."""
        return self._by_row(self.base, x)

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh) of `self(x)`, [T, in] -> [T, out], with one call of the wrapped layer per row."""
        return self._by_row(self.base.gelu, x)

    def _by_row(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = active.get()
        if len(rows) == 1:
            return compute(x)
        return torch.cat([compute(part) for part in rows.stream(self.stream).split(x)])

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """Those of the layer inside, float32 [out, in] and [out]."""
        return self.base.full_precision()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Passes weight [out, in] or bias [out] on to the wrapped layer."""
        self.base.load_tensor(name, tensor)

    def load_columns(self, name: str, tensor: Tensor, kept: Sequence[slice]) -> None:
        """Passes some inputs of a weight [out, in] on to the wrapped layer."""
        self.base.load_columns(name, tensor, kept)

    def staging_buffer(self, name: str, dtype: torch.dtype) -> Tensor | None:
        return self.base.staging_buffer(name, dtype)
