"""Every tensor that an object holds, registered in a module or not."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

OURS = "omni_grpc"
"""Objects of this package may hold tensors in attributes of any name; those of libraries are looked into where they are
modules, tensors or containers.
"""
CONTAINERS = (list, tuple, set, frozenset, deque)


def tensors(*roots: Any) -> Iterator[Tensor]:
    """Each tensor [...] that can be reached from the roots through modules, containers, dataclasses, objects of this
    package, and what functions are bound to; each once. A tensor that is made of others is followed by those. An
    object whose class has `holds_copies` is not looked into: what it has are copies of tensors of others.
    """
    seen: set[int] = set()
    # what was seen lives as long as its number counts: a property may make a new object at each look
    kept: list[Any] = []
    waiting: list[Any] = list(roots)
    while waiting:
        it = waiting.pop()
        if id(it) in seen or it is None or isinstance(it, str | bytes | int | float | type):
            continue
        seen.add(id(it))
        kept.append(it)
        if isinstance(it, Tensor):
            yield it
        waiting.extend(_held_by(it))


def _held_by(it: Any) -> Iterable[Any]:
    if isinstance(it, Tensor):
        inner = it.__tensor_flatten__()[0] if hasattr(it, "__tensor_flatten__") else ()
        return [*(getattr(it, name) for name in inner), *getattr(it, "__dict__", {}).values()]
    if isinstance(it, Mapping):
        return it.values()
    if isinstance(it, CONTAINERS):
        return it
    if isinstance(it, functools.partial):
        return (it.func, *it.args, *it.keywords.values())
    if isinstance(it, types.MethodType):
        return (it.__self__, it.__func__)
    if isinstance(it, types.FunctionType):
        return [_contents(cell) for cell in it.__closure__ or ()] + list(it.__defaults__ or ())
    if getattr(type(it), "holds_copies", False):
        return ()
    ours = type(it).__module__.partition(".")[0] == OURS
    if ours or isinstance(it, nn.Module) or dataclasses.is_dataclass(it):
        return _attributes(it)
    return ()


def _attributes(it: Any) -> list[Any]:
    slots = [name for kind in type(it).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    return [
        *getattr(it, "__dict__", {}).values(),
        *(getattr(it, name, None) for name in slots if name != "__weakref__"),
    ]


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never assigned
        return None


def storages(found: Iterable[Tensor], device: torch.device) -> dict[int, list[Tensor]]:
    """The tensors that lie in memory of a device, by the storage that they share. One without memory is left out."""
    shared: dict[int, list[Tensor]] = {}
    for tensor in found:
        if tensor.device.type != device.type or tensor.layout != torch.strided or _is_wrapper(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes():
            shared.setdefault(storage._cdata, []).append(tensor)
    return shared


def movable(found: Iterable[Tensor], device: torch.device) -> dict[int, list[Tensor]]:
    """Those whose memory is torch's own to free: a mapped file, or memory of another library, stays."""
    return {key: shared for key, shared in storages(found, device).items() if shared[0].untyped_storage().resizable()}


def memory_under(shared: Iterable[Tensor]) -> int:
    """Bytes that tensors [...] which share a storage take of it: all of it, or of a mapped file what they are."""
    shared = list(shared)
    storage = shared[0].untyped_storage()
    if storage.resizable():
        return storage.nbytes()
    parts = {(tensor.storage_offset(), tensor.nbytes) for tensor in shared}
    return min(storage.nbytes(), sum(size for _, size in parts))


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether others hold what it stands for."""
    return hasattr(tensor, "__tensor_flatten__")
