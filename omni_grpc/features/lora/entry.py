"""An adapter in memory: its tensors in one range of the host's for each component, and copied to a device as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from omni_grpc.features.lora.site import Placed, Site, Target
from omni_grpc.nn.updates import mapped
from omni_grpc.ops.host import ALIGNMENT, Region, cut
from omni_grpc.types.lora import Adapter

Copied = Callable[[Tensor], Tensor]
"""A copy of bytes, uint8 [N], on a device."""


def bytes_of(placed: Sequence[Placed]) -> int:
    """What the tensors of changes take of a memory."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in _sizes(placed).values())


class HostPart:
    """Changes of one component, with their tensors in one range of host memory: what a device gets in one copy."""

    holds_copies = True

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._region = Region(bytes_of(placed) + ALIGNMENT)
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                kept[id(tensor)] = self._region.take(tensor.shape, tensor.dtype)
                kept[id(tensor)].copy_(tensor)
            return kept[id(tensor)]

        self.placed = [Placed(one.target, mapped(one.update, keep)) for one in placed]

    def pin(self, site: Site) -> None:
        self._region.pin(site.context.device)

    def on_device(self, copied: Copied | None) -> list[Placed]:
        """The changes with their tensors on the device; None: it computes in the host's memory."""
        if copied is None or not self.placed:
            return self.placed
        there, region = copied(self._region.whole), self._region

        def same(tensor: Tensor) -> Tensor:
            start = region.offset(tensor)
            assert start is not None
            return cut(there, start, tensor.shape, tensor.dtype)

        return [Placed(one.target, mapped(one.update, same)) for one in self.placed]


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """What an adapter is to one component. `targets`: what takes its changes, each once. `host`: None where the
    host has dropped it. `waiting`: what has been copied to the device and is not in the layers yet.
    """

    site: Site
    targets: tuple[Target, ...]
    nbytes: int
    host: HostPart | None = None
    waiting: list[Placed] | None = None

    @classmethod
    def of(cls, site: Site, placed: Sequence[Placed]) -> Part:
        """What changes take, before they are kept."""
        return cls(site, tuple(dict.fromkeys(one.target for one in placed)), bytes_of(placed))

    def keep(self, placed: Sequence[Placed]) -> None:
        """Puts changes into host memory, which is pinned where they go to a device from there."""
        host = HostPart(placed)
        host.pin(self.site)
        self.host = host

    def put(self, key: str) -> None:
        """Puts what waits into the layers, if something does."""
        waiting, self.waiting = self.waiting or [], None
        by_target: dict[Target, list[Any]] = {}
        for one in waiting:
            by_target.setdefault(one.target, []).append(one.update)
        for target, updates in by_target.items():
            self.site.wrap(target).put(key, updates)

    def take(self, key: str) -> None:
        """Takes an adapter out of the layers."""
        self.waiting = None
        for target in self.targets:
            self.site.wrap(target).remove(key)


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """An adapter that is loaded, or about to be: `record` says all of it that is told. `paths`: of its files, by the
    component that each is for, "" for one that is for all. `users`: requests that have been
    admitted with it. `attached`: requests may name it; `leaving`: no more of them may.
    """

    paths: Mapping[str, Path]
    record: Adapter
    parts: list[Part] = dataclasses.field(default_factory=list)
    users: int = 0
    attached: bool = False
    leaving: bool = False

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def on_host(self) -> bool:
        return all(part.host is not None for part in self.parts)

    @property
    def stays(self) -> bool:
        """Whether it must not be dropped from memory: it is pinned, in use, or about to be."""
        return self.record.pinned or bool(self.users) or not self.attached


def _sizes(placed: Sequence[Placed]) -> Mapping[int, int]:
    """Bytes of each tensor, once."""
    found: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        found[id(tensor)] = tensor.nbytes
        return tensor

    for one in placed:
        mapped(one.update, see)
    return found
