"""A copy of tensors in the host's memory, from which their device memory is filled again.

The tensors themselves stay: what comes and goes is the memory under them. So a view keeps what it is a view of, tensors
that share memory go on sharing it, and a tensor that is away still says on which device it is at home.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from omni_grpc.ops.host import ALIGNMENT, Region
from omni_grpc.worker.device_memory import DeviceMemory
from omni_grpc.worker.reachable import movable

LARGEST_REGION = 4 << 30
"""Bytes of one range of pinned memory, unless one tensor has more. A range is pinned, or not, as a whole."""


@dataclasses.dataclass(slots=True)
class Copied:
    """The memory of some tensors: `nbytes` in a storage of the device, and its copy, uint8 [nbytes]. `written` counts
    how often it was written to, as far as torch does.
    """

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor
    written: int = 0

    @property
    def here(self) -> bool:
        return self.storage.nbytes() != 0

    @property
    def on_device(self) -> Tensor:
        """The bytes on the device, uint8 [nbytes]; there while it is `here`."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage, 0, (self.nbytes,), (1,))


class HostCopy:
    """Copies of the memory of tensors in a few ranges of pinned host memory. Where the system refuses to pin, the log
    says so, and copies are slow.
    """

    holds_copies = True

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._held: dict[int, Copied] = {}
        self._to_pin: list[Region] = []

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    @property
    def away(self) -> bool:
        """Whether there is a copy, and the device does not have what was copied."""
        return any(not held.here for held in self._held.values())

    def missing(self, found: Iterable[Tensor]) -> int:
        """Bytes that `save` would copy."""
        return sum(tensors[0].untyped_storage().nbytes() for tensors in self._new(found).values())

    def save(self, found: Iterable[Tensor]) -> int:
        """Copies the memory of these tensors that lies on the device, except what was copied before and not written to
        since; forgets what is none of theirs. Returns the bytes copied. Raises HostLibraryError or MemoryError, and
        then knows what it knew before.
        """
        found = list(found)
        kept = movable(found, self._memory.device)
        new = self._new(found)
        made: dict[int, Copied] = {}
        for chunk in _chunks([(key, tensors[0].untyped_storage().nbytes()) for key, tensors in new.items()]):
            region = Region(sum(size + ALIGNMENT for _, size in chunk))
            for key, size in chunk:
                storage = new[key][0].untyped_storage()
                made[key] = Copied(storage, size, region.take((size,), torch.uint8), _written(new[key]))
            # many threads take the pages, where the driver would take them one by one
            region.whole.zero_()
            region.pin(self._memory.device)
        self._memory.save((it.copy, it.on_device) for it in made.values())
        self._held = {key: held for key, held in self._held.items() if key in kept or not held.here} | made
        return sum(it.nbytes for it in made.values())

    def _new(self, found: Iterable[Tensor]) -> dict[int, list[Tensor]]:
        def current(key: int, tensors: Sequence[Tensor]) -> bool:
            held = self._held.get(key)
            size = tensors[0].untyped_storage().nbytes()
            return held is not None and held.nbytes == size and held.written == _written(tensors)

        shared = movable(found, self._memory.device)
        return {key: tensors for key, tensors in shared.items() if not current(key, tensors)}

    def keep(self, tensor: Tensor, region: Region) -> None:
        """Takes a tensor [...] that lies on the host into the region, and gives it a place on the device, without
        memory there. The region is pinned when it is first copied from.
        """
        own = tensor.detach().to("cpu", copy=True)
        size = own.untyped_storage().nbytes()
        home = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=self._memory.device)
        copy = region.take((size,), torch.uint8)
        copy.copy_(_bytes(own))
        tensor.data = home
        storage = tensor.untyped_storage()
        storage.resize_(0)
        self._held[storage._cdata] = Copied(storage, size, copy)
        if region not in self._to_pin:
            self._to_pin.append(region)

    def release(self) -> int:
        """Frees the memory on the device. Returns its bytes."""
        here = [held for held in self._held.values() if held.here]
        for held in here:
            held.storage.resize_(0)
        return sum(held.nbytes for held in here)

    def fetch(self) -> int:
        """Takes memory on the device again and fills it. Returns its bytes. Raises OutOfMemoryError, and then none of
        it is there.
        """
        away = [held for held in self._held.values() if not held.here]
        while self._to_pin:
            self._to_pin.pop().pin(self._memory.device)

        def taken() -> Iterable[tuple[Tensor, Tensor]]:
            for held in away:
                held.storage.resize_(held.nbytes)
                yield held.on_device, held.copy

        try:
            self._memory.fill(taken())
        except BaseException:
            for held in away:
                held.storage.resize_(0)
            raise
        return sum(held.nbytes for held in away)

    def forget(self) -> None:
        """Gives the host's memory back. Only while the device has it all."""
        assert not self.away, "the only copy"
        self._held = {}


def _bytes(tensor: Tensor) -> Tensor:
    """All of the memory under a tensor, as uint8 [bytes]."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _written(tensors: Sequence[Tensor]) -> int:
    """A number that grows when a tensor is written to in place. Those made in inference mode do not count."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _chunks(sizes: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(key, bytes) in order, in as few lists as do not exceed LARGEST_REGION."""
    chunks: list[list[tuple[int, int]]] = []
    room = 0
    for key, size in sizes:
        if not chunks or size > room:
            chunks.append([])
            room = LARGEST_REGION
        chunks[-1].append((key, size))
        room -= size
    return chunks
