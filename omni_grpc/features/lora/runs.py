"""Which tokens of a batch have which adapters, and what a layer adds to them. The first is worked out once for all
layers of a step, the second once for all steps of a batch, so that a layer takes the host a few microseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omni_grpc.nn.activations import Activation
from omni_grpc.nn.rows import Owner, Rows
from omni_grpc.nn.updates import BiasUpdate, LowRankUpdate, Update
from omni_grpc.ops.lora import LoraPlan, lora_add
from omni_grpc.ops.quant import gelu_tanh
from omni_grpc.types.lora import Lora

Parts = Mapping[str, list[Update]]
"""What each adapter changes of a layer, by Lora.key."""

Loras = tuple[Lora, ...]


class Runs:
    """Runs of adjacent rows of a batch with the same adapters: `each` is (first token, token behind the last, adapters
    that do something). Equal runs have equal plans; the hash is that of a step before, so it is kept.
    """

    __slots__ = ("_hash", "each", "keys")

    def __init__(self, each: Sequence[tuple[int, int, Loras]]) -> None:
        self.each = tuple(each)
        self.keys = tuple(dict.fromkeys(lora.key for _, _, loras in self.each for lora in loras))
        self._hash = hash(self.each)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Runs) and self.each == other.each)


NONE = Runs(())
"""Those of a batch without adapters."""


def runs_of(rows: Rows, stream: str, tokens: int, component: str, apart: bool) -> Runs:
    """The runs of `tokens` tokens of a stream. A batch of one row gets all tokens, however many: ahead of the steps,
    the tokens of "mod" are those of all steps. apart: each row is a run of its own.
    """
    of = [active_loras(owner, component) for owner in rows.owners]
    if not any(of):
        return NONE
    if len(of) == 1:
        return Runs([(0, tokens, of[0])])
    offsets = rows.stream(stream).offsets
    found = []
    for (loras, _), run in itertools.groupby(range(len(of)), key=lambda row: (of[row], apart and row)):
        numbers = list(run)
        found.append((offsets[numbers[0]], offsets[numbers[-1] + 1], loras))
    return Runs(found)


def active_loras(owner: Owner, component: str) -> Loras:
    """The adapters of a row's request that change the component."""
    return tuple(lora for lora in owner[0].request.loras if lora.scale and lora.target in ("", component))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """What a layer adds to the tokens of some runs.

    of: the changes that it was made from, of each adapter, None for one that changes nothing of the layer.
    low_rank: all that has few ranks, or is a vector, in one op. others: (tokens, change, scale).
    """

    of: tuple[tuple[str, list[Update] | None], ...]
    low_rank: LoraPlan
    others: tuple[tuple[slice, Update, float], ...]

    @classmethod
    def make(cls, runs: Runs, parts: Parts) -> LayerPlan:
        grouped, others = [], []
        for first, stop, loras in runs.each:
            mine: list[tuple[Tensor | None, Tensor, int, float]] = []
            for lora in loras:
                for update in parts.get(lora.key, ()):
                    match update:
                        case LowRankUpdate(down, up, rows):
                            mine.append((down, up, rows.start, lora.scale))
                        case BiasUpdate(vector, rows):
                            mine.append((None, vector, rows.start, lora.scale))
                        case _:
                            others.append((slice(first, stop), update, lora.scale))
            if mine:
                grouped.append((first, stop - first, mine))
        return cls(tuple((key, parts.get(key)) for key in runs.keys), LoraPlan.of(grouped), tuple(others))

    @property
    def empty(self) -> bool:
        return not self.low_rank.runs and not self.others

    def holds(self, parts: Parts) -> bool:
        """Whether the layer still has the changes that this was made from: adapters come and go."""
        return all(parts.get(key) is updates for key, updates in self.of)

    def add(self, y: Tensor, x: Activation, gelu: bool) -> Tensor:
        """y [T, out], the layer's output for x [T, in], with what is added to it; then GELU (tanh) of all of it if
        `gelu`. y is changed in place.
        """
        for tokens, update, scale in self.others:
            inputs = x[tokens] if isinstance(x, Tensor) else _values(x.codes[tokens], x.scale[tokens], x.dtype)
            y[tokens, update.rows].add_(update.change(inputs), alpha=scale)
        if self.low_rank.runs:
            codes, scale_of = (x, None) if isinstance(x, Tensor) else (x.codes, x.scale)
            lora_add(y, codes, scale_of, self.low_rank, gelu)
        elif gelu:
            return gelu_tanh(y)
        return y


def _values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale[:, None]).to(dtype)
