"""Where the weights of a loaded model are: in device memory or, while it sleeps, in the host's or nowhere."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.load_progress import size_text
from omni_grpc.worker.base import LoadedModel
from omni_grpc.worker.device_memory import DeviceMemory, memory_of
from omni_grpc.worker.host_copy import HostCopy
from omni_grpc.worker.memory import host_memory_free
from omni_grpc.worker.reachable import memory_under, storages, tensors

logger = logging.getLogger(__name__)

HOST_RESERVE = 2 << 30
"""Bytes of the host's memory that a copy of weights leaves to others."""


class Residency:
    """The weights of a model, and the other tensors that its runner keeps from one request to the next. Its worker does
    nothing else while it moves them.

    Copies of the weights are made at the first sleep and kept after waking, because weights do not change: the next
    sleep only frees device memory. Where the host gets short of memory, they are given back after waking. `memory` is
    that of the device; None: there is none beside the host's, and a sleep that keeps the weights moves nothing.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        device: torch.device,
        memory: DeviceMemory | None = None,
        *,
        host_free: Callable[[], int] = host_memory_free,
    ) -> None:
        self._roots: tuple[Any, ...] = (loaded.components, loaded.runner)
        self.components, self.counts, self.adapters = loaded.components, loaded.counts, loaded.adapters
        self._on_sleep: Sequence[Callable[[], None]] = tuple(loaded.on_sleep)
        self.device, self._host_free = device, host_free
        self._memory = memory or memory_of(device)
        self._weights = None if self._memory is None else HostCopy(self._memory)
        self._others = None if self._memory is None else HostCopy(self._memory)
        self._dropping: list[tuple[weakref.ref[Tensor], int]] = []
        self._before = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that are in device memory now; on a CPU that is the host's. Memory that several tensors
        share counts once.
        """
        return sum(size for _, size in self._sizes(self.components))

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies that are in the host's memory beside the device's."""
        return sum(copy.nbytes for copy in (self._weights, self._others) if copy is not None)

    def sleep(self) -> int:
        """Frees the device memory of the model, with its weights in the host's. Returns the bytes given back: on a CPU,
        none. Raises ResourceExhausted where the host has no room for them, and then all is as it was.
        """
        if self._memory is None or self._weights is None or self._others is None:
            return 0
        before = self._memory.reserved()
        for free in self._on_sleep:
            free()
        weights = list(tensors(self.components))
        known, found = storages(weights, self.device), storages(tensors(*self._roots), self.device)
        others = [tensor for key, shared in found.items() if key not in known for tensor in shared]
        self._check_room(self._weights.missing(weights) + self._others.missing(others))
        self._weights.save(weights)
        self._others.save(others)
        self._weights.release()
        self._others.release()
        self._memory.give_back()
        return max(0, before - self._memory.reserved())

    def wake(self) -> None:
        """Takes the weights back to the device. Raises OutOfMemoryError where it has no room, and then they still
        sleep.
        """
        if self._memory is None or self._weights is None or self._others is None:
            return
        self._weights.fetch()
        try:
            self._others.fetch()
        except BaseException:
            self._weights.release()
            self._memory.give_back()
            raise
        # they may be written to
        self._others.forget()
        if self._host_free() < HOST_RESERVE:
            logger.warning(
                "%s of weights are not kept on the host, which is short of memory: the next sleep copies them anew",
                size_text(self._weights.nbytes),
            )
            self._weights.forget()

    def begin_drop(self) -> None:
        """Frees what is made anew, and remembers what there is, to tell in `end_drop` what is gone. Whoever holds the
        model lets go of it in between, and of this object too.
        """
        if self._memory is not None:
            self._before = self._memory.reserved()
        for free in self._on_sleep:
            free()
        if self._memory is None:
            self._dropping = [(weakref.ref(tensor), size) for tensor, size in self._sizes(self._roots)]
        self._roots, self.components, self._on_sleep, self.adapters = (), {}, (), None
        self._weights = self._others = None

    def end_drop(self) -> int:
        """The bytes of device memory that have been given back since `begin_drop`, or of the host's where the model is
        there: those whose tensors are gone.
        """
        gc.collect()
        if self._memory is None:
            return sum(size for tensor, size in self._dropping if tensor() is None)
        self._memory.give_back()
        return max(0, self._before - self._memory.reserved())

    def _sizes(self, roots: Any) -> Iterator[tuple[Tensor, int]]:
        """One tensor of each storage on the device, and the bytes of it."""
        for shared in storages(tensors(roots), self.device).values():
            yield shared[0], memory_under(shared)

    def _check_room(self, needed: int) -> None:
        free = self._host_free()
        if needed and needed + HOST_RESERVE > free:
            raise ResourceExhausted(
                f"the host has {size_text(free)} of memory left, of which {size_text(HOST_RESERVE)} stay free, and the "
                f"model needs {size_text(needed)} of it to sleep; let it drop its weights instead",
                reason="HOST_MEMORY",
            )
