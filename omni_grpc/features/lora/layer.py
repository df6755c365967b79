"""The wrapper of a linear layer that adds, for each row, the changes of its request's adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from omni_grpc.features import Context
from omni_grpc.features.lora.runs import NONE, LayerPlan, Runs, runs_of
from omni_grpc.loading.adapters.binding import Change, Part
from omni_grpc.loading.adapters.deltas import Bias, Dense, Kron, LowRank
from omni_grpc.nn.activations import Activation
from omni_grpc.nn.linear import AnyLinear, Shard, activate, active
from omni_grpc.nn.rows import Owner
from omni_grpc.nn.updates import BiasUpdate, DenseUpdate, KronUpdate, LowRankUpdate, Update, columns, moved
from omni_grpc.types.lora import Lora

MAX_PLANS = 16
"""Batches of which a layer remembers what it adds, at most. They hold factors of adapters that are gone until then."""


class LoraLinear(AnyLinear):
    """Adds to each row the change of its request's adapters. `parts` holds the adapters of the layer, by name. With
    `apart`, rows are computed one by one even where they have the same adapters.
    """

    def __init__(self, base: AnyLinear, component: str, *, apart: bool = False, shard: Shard | None = None) -> None:
        super().__init__()
        self.shard = shard
        self.base, self.component, self.apart = base, component, apart
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.parts: dict[str, list[Update]] = {}
        self._note = ("lora", component, self.stream, apart)
        self._plans: dict[Runs, LayerPlan] = {}

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

    @property
    def activation_dtype(self) -> torch.dtype | None:
        """That of the layer inside: what adapters add is made of the same codes."""
        return self.base.activation_dtype

    def forward(self, x: Activation) -> Tensor:
        """x [T, in], in full precision or as the wrapped layer reads it -> [T, out]: the wrapped layer, plus the
        changes of each row's adapters.
        """
        plan = self._plan(x)
        y: Tensor = self.base(x)
        return y if plan is None else plan.add(y, x, gelu=False)

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh) of `self(x)`, [T, in] -> [T, out], in the pass that adds the changes; where there are none, it is
        the wrapped layer's own.
        """
        plan = self._plan(x)
        if plan is None:
            return self.base.gelu(x)
        rows = active.get()
        if self.apart and len(rows) > 1:
            # the wrapped layer's GELU may differ in the last bit, so a row has to get what it would get alone
            outputs = []
            for row, part in enumerate(rows.stream(self.stream).split(x)):
                with activate(rows.narrow([row])):
                    outputs.append(self.gelu(part))
            return torch.cat(outputs)
        y: Tensor = self.base(x)
        return plan.add(y, x, gelu=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Passes weight [out, in] or bias [out] on to the wrapped layer."""
        self.base.load_tensor(name, tensor)

    def _plan(self, x: Activation) -> LayerPlan | None:
        """What is to be added for x [T, in], by the owners of the active rows; None: nothing."""
        rows = active.get()
        tokens = (x if isinstance(x, Tensor) else x.codes).shape[0]
        runs: Runs | None = rows.notes.get((*self._note, tokens))
        if runs is None:
            runs = rows.notes[(*self._note, tokens)] = runs_of(rows, self.stream, tokens, self.component, self.apart)
        if runs is NONE:
            return None
        plan = self._plans.get(runs)
        if plan is None or not plan.holds(self.parts):
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[runs] = LayerPlan.make(runs, self.parts)
        return None if plan.empty else plan


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
