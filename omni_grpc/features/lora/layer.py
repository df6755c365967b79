"""The wrapper of a linear layer that adds, for each row, the changes of its request's adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from omni_grpc.features import Context
from omni_grpc.loading.adapters.binding import Change, Part
from omni_grpc.loading.adapters.deltas import Bias, Dense, Kron, LowRank
from omni_grpc.nn.linear import AnyLinear, Shard, active
from omni_grpc.nn.rows import Owner
from omni_grpc.nn.updates import BiasUpdate, DenseUpdate, KronUpdate, LowRankUpdate, Update, columns, moved
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

    def add(self, name: str, change: Change, parts: Sequence[Part], context: Context) -> None:
        """Adds an adapter's change of the layer, or this rank's part of it: the rows that make its outputs, the columns
        that read its inputs.
        """
        weights = context.spec.weights[context.component]
        precise = any(weights.in_float32(f"{context.places[part.module].path}.weight") for part in change.parts)
        dtype = torch.float32 if precise else context.dtype
        updates = self.parts.setdefault(name, [])
        for part in parts:
            for mine, theirs in _common(part.rows, None if self.shard is None else self.shard.outputs):
                source = slice(part.source.start + theirs.start, part.source.start + theirs.stop)
                if (update := self._update(change, source, mine)) is not None:
                    updates.append(moved(update, context.device, dtype))

    def _update(self, change: Change, source: slice, rows: slice) -> Update | None:
        """These rows of a change, for rows of this layer; None for what another rank adds. In float32, with the scale
        of the file.
        """
        inputs = None if self.shard is None else self.shard.inputs
        match change.delta:
            case LowRank(down, up):
                part = up[source]
                # the layers of a fused one may have factors of their own, side by side
                used = part.any(0)
                if used.any() and not used.all():
                    down, part = down[used], part[:, used]
                return LowRankUpdate(columns(down, inputs), part * change.scale, rows)
            case Kron(first, second):
                return KronUpdate.cut(first * change.scale, second, source, rows, inputs)
            case Dense(weight):
                return DenseUpdate(columns(weight[source], inputs) * change.scale, rows)
            case Bias(vector):
                # once, where the ranks sum
                if self.shard is not None and inputs is not None and dist.get_rank(self.shard.group):
                    return None
                return BiasUpdate(vector[source] * change.scale, rows)

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


def _common(rows: slice, kept: Sequence[slice] | None) -> Iterator[tuple[slice, slice]]:
    """Of some rows of a weight, those that a rank has: where they are in its part, and which of `rows` they are."""
    if kept is None:
        yield rows, slice(0, rows.stop - rows.start)
        return
    at = 0
    for part in kept:
        start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
        if start < stop:
            shift = at - part.start
            yield slice(start + shift, stop + shift), slice(start - rows.start, stop - rows.start)
        at += part.stop - part.start


def _loras(owner: Owner) -> tuple[Lora, ...]:
    loras: tuple[Lora, ...] = owner[0].request.loras
    return loras
