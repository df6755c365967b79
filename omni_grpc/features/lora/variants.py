"""Merged weights that are kept for the requests that use them: so many bytes, those used longest ago go first."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.features.lora.layer import owner_loras
from omni_grpc.nn.rows import Owner
from omni_grpc.types.lora import Lora

Chain = tuple[tuple[str, float], ...]
"""The adapters of a request that make a new weight of a layer, by Lora.key, and their scales, in its order."""

Key = tuple[int, Chain]
"""The number of a layer, and what is merged into its weight."""


class MergedCache:
    """The merged weights of all layers of a model, `limit` bytes at most. A weight whose requests are still running
    stays; what finds no place beside those is merged anew whenever it is used, which takes time and no memory.

    `generation` changes when a weight goes away, so that whoever has kept its address does not use it. `evictions`: how
    many went for others.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.generation, self.size, self.merges, self.evictions = limit, 0, 0, 0, 0
        self._kept: collections.OrderedDict[Key, Tensor] = collections.OrderedDict()
        self._states: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()
        # prepare and step have lanes of their own
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def new_number(self) -> int:
        """A number for a layer, unlike all others."""
        return next(self._numbers)

    def variant(self, owner: Owner) -> tuple[Lora | int, ...]:
        """What layers with merged weights look at in a row's owner, and what makes recordings of them stale. A request
        whose batches are asked for it has its weights in use from then on, also where a recording computes them.
        """
        loras = owner_loras(owner)
        if not loras:
            return ()
        self._note(owner[0])
        return (*loras, self.generation)

    def get(self, key: Key, users: Sequence[Any], make: Callable[[], Tensor]) -> Tensor:
        """The weight [out, in] of a key; what `make` returns, where it is not kept. `users` are the states it is
        for.
        """
        for user in users:
            self._note(user)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        weight = make()
        with self._lock:
            self.merges += 1
            # what is allocated while a graph is captured is the graph's
            capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
            if not capturing and key not in self._kept and self._make_room(weight.nbytes):
                self._kept[key] = weight
                self.size += weight.nbytes
        return weight

    def drop(self, chosen: Callable[[Key], bool]) -> None:
        """Drops the weights whose keys are chosen: those of an adapter that is unloaded."""
        with self._lock:
            self._drop([key for key in self._kept if chosen(key)])

    def clear(self) -> None:
        """Drops all weights; each is merged again when it is used."""
        self.drop(lambda key: True)

    def _note(self, state: Any) -> None:
        known = self._states.get(id(state))
        if known is None or known() is not state:
            with self._lock:
                self._alive()
                self._states[id(state)] = weakref.ref(state)

    def _alive(self) -> list[Any]:
        """The states that are still there; others are forgotten."""
        found = {number: state for number, ref in self._states.items() if (state := ref()) is not None}
        self._states = {number: self._states[number] for number in found}
        return list(found.values())

    def _make_room(self, needed: int) -> bool:
        if self.size + needed <= self.limit:
            return True
        used = [{(lora.key, lora.scale) for lora in state.request.loras} for state in self._alive()]
        idle, freed = [], 0
        for (number, chain), weight in self._kept.items():
            if not any(loras.issuperset(chain) for loras in used):
                idle.append((number, chain))
                freed += weight.nbytes
                if self.size - freed + needed <= self.limit:
                    self._drop(idle)
                    self.evictions += len(idle)
                    return True
        return False

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.size -= self._kept.pop(key).nbytes
            self.generation += 1
