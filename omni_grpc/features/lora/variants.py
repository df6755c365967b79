"""Merged weights that are kept for the requests that use them: so many bytes, those used longest ago go first."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.features.lora.layer import owner_loras
from omni_grpc.nn.rows import Owner
from omni_grpc.types.lora import Lora


@dataclasses.dataclass(slots=True)
class Kept:
    """A merged weight, and the requests' states that have used it."""

    weight: Tensor
    users: dict[int, weakref.ref[Any]] = dataclasses.field(default_factory=dict)

    def use(self, users: Sequence[Any]) -> None:
        for user in users:
            self.users.setdefault(id(user), weakref.ref(user))

    @property
    def in_use(self) -> bool:
        """Whether one of them is still there."""
        self.users = {number: user for number, user in self.users.items() if user() is not None}
        return bool(self.users)


class MergedCache:
    """The merged weights of all layers of a model, `limit` bytes at most. A weight whose requests are still running
    stays; what finds no place beside those is merged anew whenever it is used, which takes time and no memory.

    `generation` changes when a weight goes away, so that whoever has kept its address (CUDA graphs) does not use it.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.generation, self.size, self.merges = limit, 0, 0, 0
        self._kept: collections.OrderedDict[Hashable, Kept] = collections.OrderedDict()
        self._numbers = itertools.count()
        # prepare and step have lanes of their own
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def new_number(self) -> int:
        """A number for a layer, unlike all others."""
        return next(self._numbers)

    def variant(self, owner: Owner) -> tuple[tuple[Lora, ...], int]:
        """What layers with merged weights look at in a row's owner, and what makes recordings of them stale."""
        loras = owner_loras(owner)
        return loras, self.generation if loras else 0

    def get(self, key: Hashable, users: Sequence[Any], make: Callable[[], Tensor]) -> Tensor:
        """The weight [out, in] of a key; what `make` returns, where it is not kept. `users` are the states it is
        for.
        """
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                kept.use(users)
                return kept.weight
        weight = make()
        with self._lock:
            self.merges += 1
            # what is allocated while a graph is captured is the graph's
            capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
            if not capturing and key not in self._kept and self._make_room(weight.nbytes):
                self._kept[key] = kept = Kept(weight)
                kept.use(users)
                self.size += weight.nbytes
        return weight

    def drop(self, chosen: Callable[[Any], bool]) -> None:
        """Drops the weights whose keys are chosen: those of an adapter that is unloaded."""
        with self._lock:
            self._drop([key for key in self._kept if chosen(key)])

    def clear(self) -> None:
        """Drops all weights; each is merged again when it is used."""
        self.drop(lambda key: True)

    def _make_room(self, needed: int) -> bool:
        if self.size + needed <= self.limit:
            return True
        idle, freed = [], 0
        for key, kept in self._kept.items():
            if not kept.in_use:
                idle.append(key)
                freed += kept.weight.nbytes
                if self.size - freed + needed <= self.limit:
                    self._drop(idle)
                    return True
        return False

    def _drop(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            self.size -= self._kept.pop(key).weight.nbytes
            self.generation += 1
