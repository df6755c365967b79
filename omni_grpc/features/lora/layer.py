"""The wrapper of a linear layer that adds, for each row, the changes of its request's adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from omni_grpc.nn.linear import AnyLinear, Shard, active
from omni_grpc.nn.rows import Owner
from omni_grpc.nn.updates import Update
from omni_grpc.types.lora import Lora


class LoraLinear(AnyLinear):
    """Adds to each row the change of its request's adapters. `parts` holds the adapters of the layer, by Lora.key. With
    `apart`, rows are computed one by one even where they have the same adapters.
    """

    def __init__(self, base: AnyLinear, component: str, *, apart: bool = False, shard: Shard | None = None) -> None:
        super().__init__()
        self.shard = shard
        self.base, self.component, self.apart = base, component, apart
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.parts: dict[str, list[Update]] = {}

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return _loras

    @property
    def weight(self) -> Tensor:
        """The weight of the layer inside: models ask their layers for dtype and device."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    def put(self, key: str, updates: Sequence[Update]) -> None:
        """Takes an adapter's changes of the layer, on its device. What had this key before is gone. From any thread:
        rows that run meanwhile have other adapters.
        """
        self.parts[key] = list(updates)

    def remove(self, key: str) -> None:
        """Drops an adapter, if the layer has it. From any thread, as `put`."""
        self.parts.pop(key, None)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]: the wrapped layer, plus the changes of each row's adapters."""
        y: Tensor = self.base(x)
        for tokens, loras in self._adapter_runs():
            for lora in loras:
                if lora.scale and lora.target in ("", self.component):
                    for part in self.parts.get(lora.key, ()):
                        y[tokens, part.rows].add_(part.change(x[tokens]), alpha=lora.scale)
        return y

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Passes weight [out, in] or bias [out] on to the wrapped layer."""
        self.base.load_tensor(name, tensor)

    def _adapter_runs(self) -> Iterator[tuple[slice, tuple[Lora, ...]]]:
        """Runs of adjacent rows with the same adapters, each as a slice of the layer's tokens. A batch of one row gets
        all tokens, however many: ahead of the steps, the tokens of "mod" are those of all steps.
        """
        rows = active.get()
        if len(rows) == 1:
            yield slice(None), _loras(rows.owners[0])
            return
        offsets = rows.stream(self.stream).offsets
        of = [_loras(owner) for owner in rows.owners]
        for (loras, _), run in itertools.groupby(range(len(rows)), key=lambda row: (of[row], self.apart and row)):
            numbers = list(run)
            yield slice(offsets[numbers[0]], offsets[numbers[-1] + 1]), loras


class AdapterKeys(nn.Module):
    """Says for a stack which adapters its rows have, before any of its layers is wrapped."""

    NAME = "adapter_keys"

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return _loras


def _loras(owner: Owner) -> tuple[Lora, ...]:
    loras: tuple[Lora, ...] = owner[0].request.loras
    return loras
