"""The host's memory in the part of a device's, so that what moves weights can be tried without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from omni_grpc.worker.device_memory import DeviceMemory, Pair


class PretendMemory(DeviceMemory):
    """Counts what is copied each way. `fails`: raises OutOfMemoryError at the copy with this number; `meanwhile` is
    called during each fill; `taken` says what a device's allocator would.
    """

    def __init__(self, taken: Callable[[], int] = lambda: 0) -> None:
        super().__init__(torch.device("cpu"))
        self.taken = taken
        self.saved: list[int] = []
        self.filled: list[int] = []
        self.budget = 0
        self.given_back = 0
        self.fails: int | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def save(self, pairs: Iterable[Pair]) -> None:
        for target, source in pairs:
            target.copy_(source)
            self.saved.append(source.nbytes)

    def fill(self, pairs: Iterable[Pair]) -> None:
        with self._lock:
            for target, source in pairs:
                if self.fails is not None and len(self.filled) >= self.fails:
                    raise torch.OutOfMemoryError("no room")
                target.copy_(source)
                self.filled.append(source.nbytes)
        self.meanwhile()

    def give_back(self) -> None:
        self.given_back += 1

    def limit(self, budget: int) -> None:
        self.budget = budget

    def reserved(self) -> int:
        return self.taken()
