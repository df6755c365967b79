"""The seam between the host's memory and a device's: copies, and what the device's allocator holds."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable

import torch
from torch import Tensor

NAP = 100e-6
"""Seconds between two looks at whether copies are done."""

Pair = tuple[Tensor, Tensor]
"""Where bytes go, and where they come from: uint8 [N] each, one on the device and one on the host."""


class DeviceMemory(abc.ABC):
    """Moves bytes between the host and one device. Each call returns when all of its bytes are there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abc.abstractmethod
    def save(self, pairs: Iterable[Pair]) -> None:
        """Copies to the host what the device has computed so far."""

    @abc.abstractmethod
    def fill(self, pairs: Iterable[Pair]) -> None:
        """Copies to the device. Whatever was launched before goes on meanwhile, and what is launched by other threads
        does not wait for the copies.
        """

    def copied(self, source: Tensor) -> Tensor:
        """A copy on the device of bytes of the host, uint8 [N]."""
        target = torch.empty_like(source, device=self.device)
        self.fill([(target, source)])
        return target

    @abc.abstractmethod
    def give_back(self) -> None:
        """Returns memory that is allocated and not in use to the device."""

    @abc.abstractmethod
    def limit(self, budget: int) -> None:
        """From now on, more than so many bytes of tensors are an OutOfMemoryError of this process."""

    @abc.abstractmethod
    def reserved(self) -> int:
        """Bytes of the device that this process has taken for tensors, in use or not."""


class CudaMemory(DeviceMemory):
    """A CUDA device. Copies to it have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)
        self._copies = torch.cuda.Stream(self.device)

    def save(self, pairs: Iterable[Pair]) -> None:
        torch.cuda.synchronize(self.device)
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()

    def fill(self, pairs: Iterable[Pair]) -> None:
        """The calling thread waits, and not the stream that all threads launch on: a stream that waited would hold up
        the steps of others for as long as the copies take.
        """
        current = torch.cuda.current_stream(self.device)
        try:
            for target, source in pairs:
                # the memory may have been that of a tensor which work launched before still reads
                self._copies.wait_stream(current)
                with torch.cuda.stream(self._copies):
                    target.copy_(source, non_blocking=True)
        finally:
            # also where a target could not be had: those before it are being written to
            done = self._copies.record_event()
            # a thread that blocks in the driver may hold locks that others need to launch
            while not done.query():
                time.sleep(NAP)

    def give_back(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def limit(self, budget: int) -> None:
        """What is beyond would else come from what others on the same device need."""
        _, total = torch.cuda.mem_get_info(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), self.device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """That of a device beside the host's; None on a CPU, whose memory is the host's."""
    return CudaMemory(device) if device.type == "cuda" else None
