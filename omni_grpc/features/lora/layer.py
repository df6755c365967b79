"""The wrapper of a linear layer that adds, for each row, the changes of its request's adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from omni_grpc.features.lora.runs import NONE, LayerPlan, Runs, runs_of
from omni_grpc.nn.activations import Activation
from omni_grpc.nn.linear import AnyLinear, Shard, activate, active
from omni_grpc.nn.rows import Owner
from omni_grpc.nn.updates import Update
from omni_grpc.types.lora import Lora

MAX_PLANS = 16
"""Batches of which a layer remembers what it adds, at most."""


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
        self._note = ("lora", component, self.stream, apart)
        self._plans: dict[Runs, LayerPlan] = {}

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return owner_loras

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
        self._plans.clear()

    def remove(self, key: str) -> None:
        """Drops an adapter, if the layer has it. From any thread, as `put`."""
        self.parts.pop(key, None)
        # they hold its factors
        self._plans.clear()

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

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """Those of the layer inside, float32 [out, in] and [out]."""
        return self.base.full_precision()

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


class AdapterKeys(nn.Module):
    """Says for a stack which adapters its rows have, before any of its layers is wrapped."""

    NAME = "adapter_keys"

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return owner_loras


def owner_loras(owner: Owner) -> tuple[Lora, ...]:
    """The adapters of a row's request."""
    loras: tuple[Lora, ...] = owner[0].request.loras
    return loras
