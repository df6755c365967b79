"""Where the weights of a loaded model are: in device memory, or, while it sleeps, in the host's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Residency:
    """The tensors of a model's components. Its worker does nothing else while it moves them."""

    def __init__(self, components: Mapping[str, Any], device: torch.device) -> None:
        self._parts = [part for part in components.values() if isinstance(part, nn.Module)]
        self._device = device
        self._moved: list[Tensor] = []

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that are in device memory now; on a CPU that is the host's."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor.device.type == self._device.type)

    def sleep(self) -> int:
        """Moves the weights to pinned host memory. Returns the bytes of device memory given back: on a CPU, none."""
        if self._device.type == "cpu":
            return 0
        freed = 0
        self._moved = [tensor for tensor in self._tensors() if tensor.device.type == self._device.type]
        for tensor in self._moved:
            freed += tensor.nbytes
            tensor.data = tensor.data.cpu().pin_memory()
        torch.cuda.empty_cache()
        return freed

    def wake(self) -> None:
        """Takes them back to the device."""
        for tensor in self._moved:
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        if self._moved:
            torch.cuda.synchronize(self._device)
        self._moved = []

    def _tensors(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        for part in self._parts:
            for tensor in itertools.chain(part.parameters(), part.buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor
