"""CPU offload of a native model: text encoders and the VAE are on the device while they run, and in the host's memory
otherwise. The denoiser stays.

A component is fetched by whoever calls it, and freed at the end of the phase that called it, unless another phase is
still at it. Nothing is copied back. The copies have a stream of their own, and only the thread that needs them waits.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from omni_grpc.ops.host import ALIGNMENT, Region
from omni_grpc.worker.device_memory import DeviceMemory
from omni_grpc.worker.host_copy import HostCopy

logger = logging.getLogger(__name__)

METHODS = ("encode", "decode")
"""How an autoencoder is entered, beside its forward."""


class Staged:
    """One component that comes and goes. `need`: bytes of the device while it runs, its work included. `users`: calls
    that run; `holders`: phases that have called it and go on.
    """

    def __init__(self, name: str, whole: HostCopy, need: int, *, encoder: bool) -> None:
        self.name, self.whole, self.need, self.encoder = name, whole, need, encoder
        self.present = self.coming = False
        self.users = self.holders = 0


class StagedBlock:
    """A block that is on the device while it runs. Its component has room for it."""

    def __init__(self, copy: HostCopy) -> None:
        self._copy = copy
        self._lock = threading.Lock()
        self._users = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._copy.fetch()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._copy.release()


class Staging:
    """The components of a model that are staged, and the room that they share on the device: `room` bytes, None for as
    much as all encoders or the largest other component need. What is not in use makes way for what is called; what
    finds no room waits until it is there.

    by_block: components of which one block at a time is on the device, beside what is in no block. work: bytes that a
    component works with while it runs, by name.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        only: Collection[str] | None = None,
        room: int | None = None,
        by_block: Collection[str] = (),
        work: Mapping[str, int] | None = None,
    ) -> None:
        self._memory, self._only, self._room = memory, only, room
        self._by_block, self._work = by_block, dict(work or {})
        self._staged: collections.OrderedDict[str, Staged] = collections.OrderedDict()
        self._changed = threading.Condition()
        self._phase: ContextVar[set[Staged] | None] = ContextVar("phase", default=None)

    @property
    def names(self) -> tuple[str, ...]:
        """The components that are staged."""
        return tuple(sorted(self._staged))

    @property
    def present(self) -> tuple[str, ...]:
        """Those on the device now."""
        with self._changed:
            return tuple(sorted(name for name, staged in self._staged.items() if staged.present))

    def take(self, name: str, module: nn.Module) -> bool:
        """Stages a component whose weights lie on the host, and returns whether it did: False for one that is to stay
        on the device.
        """
        if self._only is not None and name not in self._only:
            return False
        blocks = largest_list(module) if name in self._by_block else []
        # what several blocks share is there as long as the component is
        times = collections.Counter(id(tensor) for block in blocks for tensor in _tensors(block))
        whole = self._kept([tensor for tensor in _tensors(module) if times[id(tensor)] != 1])
        copies = [self._kept([tensor for tensor in _tensors(block) if times[id(tensor)] == 1]) for block in blocks]
        # one computes and its memory may not be free yet when the next one comes
        need = whole.nbytes + 2 * max((copy.nbytes for copy in copies), default=0) + self._work.get(name, 0)
        staged = Staged(name, whole, need, encoder=not hasattr(module, "decode"))
        self._staged[name] = staged
        for block, copy in zip(blocks, copies, strict=True):
            _around(block, StagedBlock(copy).entered)
        _enter(module, lambda: self.entered(staged))
        logger.debug("%s: %d bytes on the host, %d on the device while it runs", name, whole.nbytes, need)
        return True

    def _kept(self, tensors: list[Tensor]) -> HostCopy:
        copy = HostCopy(self._memory)
        region = Region(sum(tensor.numel() * tensor.element_size() + ALIGNMENT for tensor in tensors))
        for tensor in tensors:
            if tensor.numel():
                copy.keep(tensor, region)
            else:
                tensor.data = tensor.data.to(self._memory.device)
        return copy

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """What is called inside stays until the end of the block, unless others need the room."""
        called: set[Staged] = set()
        token = self._phase.set(called)
        try:
            yield
        finally:
            self._phase.reset(token)
            with self._changed:
                for staged in called:
                    staged.holders -= 1
                    self._free_unused(staged)
                self._changed.notify_all()

    def clear(self) -> None:
        """Frees what is there and not in use."""
        with self._changed:
            for staged in self._staged.values():
                if staged.present and not staged.users:
                    self._free(staged)

    @contextlib.contextmanager
    def entered(self, staged: Staged) -> Iterator[None]:
        """Has a component on the device inside of the block."""
        self._come(staged)
        phase = self._phase.get()
        with self._changed:
            if phase is not None and staged not in phase:
                phase.add(staged)
                staged.holders += 1
        try:
            yield
        finally:
            with self._changed:
                staged.users -= 1
                self._free_unused(staged)
                self._changed.notify_all()

    def _come(self, staged: Staged) -> None:
        """Counts another user, and returns when the component is there. Raises OutOfMemoryError."""
        with self._changed:
            while staged.coming or not (staged.present or self._make_room(staged)):
                self._changed.wait()
            staged.users += 1
            if staged.present:
                return
            staged.coming = True
        try:
            staged.whole.fetch()
            came = True
        except BaseException:
            came = False
            raise
        finally:
            with self._changed:
                staged.coming, staged.present = False, came
                staged.users -= not came
                self._staged.move_to_end(staged.name)
                self._changed.notify_all()

    def _make_room(self, wanted: Staged) -> bool:
        """Frees what is there and not in use, longest ago first, as far as `wanted` needs it. Returns whether there is
        room then; alone, a component always finds it.
        """
        room = self.room
        others = [it for it in self._staged.values() if it is not wanted and (it.present or it.coming)]
        taken = sum(it.need for it in others)
        for it in others:
            if taken + wanted.need <= room:
                break
            if it.present and not it.users:
                self._free(it)
                taken -= it.need
                others = [other for other in others if other is not it]
        return taken + wanted.need <= room or not others

    @property
    def room(self) -> int:
        """Bytes on the device that the staged components share."""
        if self._room is not None:
            return self._room
        encoders = sum(it.need for it in self._staged.values() if it.encoder)
        return max([encoders, *(it.need for it in self._staged.values())])

    def _free_unused(self, staged: Staged) -> None:
        if staged.present and not (staged.users or staged.holders):
            self._free(staged)

    def _free(self, staged: Staged) -> None:
        staged.whole.release()
        staged.present = False


def _enter(module: nn.Module, present: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Makes every way into a component go through `present`: its own forward, that of each part of it, and what an
    autoencoder is called by. A shallow copy of the module is entered in the same way.
    """
    for part in (module, *module.children()):
        _around(part, present)
    kind: Any = type(module)
    names = [name for name in METHODS if callable(getattr(kind, name, None))]
    if names:
        methods = {name: _wrapped(getattr(kind, name), present) for name in names}
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _around(module: nn.Module, present: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    # in the instance, where libraries that look at the class or at the signature find what they know
    module.forward = _wrapped(module.forward, present)


def _wrapped(call: Callable[..., Any], present: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    @functools.wraps(call)
    def entered(*arguments: Any, **named: Any) -> Any:
        with present():
            return call(*arguments, **named)

    return entered


def largest_list(module: nn.Module) -> list[nn.Module]:
    """The blocks of the part of a module that repeats most bytes: its largest ModuleList."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    size = {id(part): sum(tensor.nbytes for tensor in _tensors(part)) for part in lists}
    return list(max(lists, key=lambda part: size[id(part)])) if lists else []


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Each parameter and buffer once."""
    seen: set[int] = set()
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
