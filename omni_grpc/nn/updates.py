"""What is added to the output of a linear layer for some of its tokens: low rank, a Kronecker product, a whole matrix,
or a bias. Each computes some rows of the layer's weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """up [rows, r] @ down [r, in]."""

    down: Tensor
    up: Tensor
    rows: slice

    def change(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, rows]: 2 r (in + rows) operations for each token."""
        return F.linear(F.linear(x, self.down), self.up)


@dataclasses.dataclass(frozen=True, slots=True)
class KronUpdate:
    """Rows `kept` of the Kronecker product of first [l, m] and second [k, n], which is never built. `inputs`: the
    columns of the product that x has, one after the other; None: all.
    """

    first: Tensor
    second: Tensor
    kept: slice
    rows: slice
    inputs: tuple[slice, ...] | None = None

    @classmethod
    def cut(
        cls, first: Tensor, second: Tensor, source: slice, rows: slice, inputs: tuple[slice, ...] | None
    ) -> KronUpdate:
        """Rows `source` of the product, for rows `rows` of the layer: of `first` [l, m], the rows that they take."""
        block = second.shape[0]
        begin, end = source.start // block, -(-source.stop // block)
        kept = slice(source.start - begin * block, source.stop - begin * block)
        return cls(first[begin:end].contiguous(), second, kept, rows, inputs)

    def change(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, rows]: 2 m k n + 2 l m k operations for each token."""
        (blocks, groups), (size, width) = self.first.shape, self.second.shape
        if self.inputs is not None:
            whole = x.new_zeros(x.shape[0], groups * width)
            at = 0
            for part in self.inputs:
                whole[:, part] = x[:, at : at + part.stop - part.start]
                at += part.stop - part.start
            x = whole
        inner = F.linear(x.reshape(-1, groups, width), self.second)
        out = torch.matmul(self.first, inner).reshape(-1, blocks * size)
        return out[:, self.kept]


@dataclasses.dataclass(frozen=True, slots=True)
class DenseUpdate:
    """weight [rows, in]."""

    weight: Tensor
    rows: slice

    def change(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, rows]: as much work as these rows of the layer itself."""
        return F.linear(x, self.weight)


@dataclasses.dataclass(frozen=True, slots=True)
class BiasUpdate:
    """vector [rows]."""

    vector: Tensor
    rows: slice

    def change(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, rows], the same for each token."""
        return self.vector.expand(x.shape[0], -1)


Update = LowRankUpdate | KronUpdate | DenseUpdate | BiasUpdate


def columns(weight: Tensor, inputs: Sequence[slice] | None) -> Tensor:
    """These columns of a matrix [rows, in], one after the other; None: all."""
    return weight if inputs is None else torch.cat([weight[:, part] for part in inputs], 1)


def mapped(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A dataclass with `change` of each tensor in it, of any shape, also in tuples and in dataclasses that it has."""
    made: Any = value
    if isinstance(value, Tensor):
        made = change(value)
    elif type(value) is tuple:
        made = tuple(mapped(each, change) for each in cast("tuple[Any, ...]", value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        made = dataclasses.replace(value, **{name: mapped(getattr(value, name), change) for name in names})
    return cast(T, made)
