"""The host family: pinned staging memory, files that are read straight into it, and prefetching copies of blocks.

csrc/common/host.h declares its C functions; without the compiled library, torch serves.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from omni_grpc.ops.library import load_native

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes, enough for every kernel and every copy engine."""
PAGE = 4096
HOST = -1
READ_THREADS = 8


class HostLibraryError(RuntimeError):
    """An error of the compiled library, in its words."""


class _Piece(ctypes.Structure):
    """As omni::Piece."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("target", ctypes.c_void_p),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled library, None where there is none. A call lets other threads run."""
    native = load_native()
    if not native.loaded:
        return None
    library = ctypes.CDLL(str(native.path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, arguments in {
        "omni_region_map": (size, ctypes.POINTER(pointer)),
        "omni_region_unmap": (pointer, size),
        "omni_region_pin": (pointer, size, number),
        "omni_region_unpin": (pointer, number),
        "omni_read_pieces": (ctypes.POINTER(_Piece), size, number),
        "omni_streamer_open": (number, number, ctypes.POINTER(pointer)),
        "omni_streamer_copy": (pointer, number, pointer, pointer, size),
        "omni_streamer_wait": (pointer, number, pointer),
        "omni_streamer_release": (pointer, number, pointer),
        "omni_streamer_close": (pointer,),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_char_p
    return library


def _call(function: Callable[..., bytes | None], *arguments: Any) -> None:
    problem = function(*arguments)
    if problem is not None:
        raise HostLibraryError(problem.decode(errors="replace"))


class Region:
    """A range of host memory that tensors are cut from, one after the other, so that one copy takes them all.

    `capacity` bytes of addresses are reserved; memory is taken as it is written. It is given back, and unpinned, with
    the last tensor that was cut from it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(capacity, 1)
        self.used = 0
        self._sealed = False
        self._pinned_for: list[int] = []
        self._lock = threading.Lock()
        library = _library()
        if library is None:
            self._bytes = torch.empty(self.capacity, dtype=torch.uint8)
            return
        where = ctypes.c_void_p()
        _call(library.omni_region_map, self.capacity, ctypes.byref(where))
        assert where.value is not None
        memory = (ctypes.c_uint8 * self.capacity).from_address(where.value)
        closing = weakref.finalize(memory, _give_back, library, where.value, self.capacity, self._pinned_for)
        # the end of the process gives all back, and the driver may be gone by then
        closing.atexit = False
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    @property
    def whole(self) -> Tensor:
        """All that has been cut from it, as bytes."""
        return self._bytes[: self.used]

    @property
    def pinned(self) -> bool:
        return bool(self._pinned_for)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Room for a tensor, not initialised. Raises HostLibraryError where the region is full."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            start = -(-self.used // ALIGNMENT) * ALIGNMENT
            if self._sealed or start + size > self.capacity:
                raise HostLibraryError(
                    f"a region of {self.capacity} bytes has no room for {size} more after {self.used}"
                )
            self.used = start + size
        return cut(self._bytes, start, shape, dtype)

    def offset(self, tensor: Tensor) -> int | None:
        """The byte offset of a tensor [...], of any shape, in the region; None if it lies elsewhere."""
        start = tensor.data_ptr() - self.address
        return start if tensor.device.type == "cpu" and 0 <= start < self.capacity else None

    def pin(self, device: torch.device) -> None:
        """Makes copies to a CUDA device fast, and leaves the host free meanwhile. Nothing can be cut from the region
        afterwards. Where the system refuses, it says so once, and copies are slow.
        """
        with self._lock:
            library = _library()
            if device.type != "cuda" or self._sealed or not self.used or library is None:
                return
            index, self._sealed = _number(device), True
            try:
                _call(library.omni_region_pin, self.address, -(-self.used // PAGE) * PAGE, index)
            except HostLibraryError as error:
                logger.warning("%d MiB of weights stay in memory that is not pinned: %s", self.used >> 20, error)
            else:
                self._pinned_for.append(index)


def _number(device: torch.device) -> int:
    """What the library calls a device."""
    if device.type != "cuda":
        return HOST
    return torch.cuda.current_device() if device.index is None else device.index


def _give_back(library: ctypes.CDLL, address: int, capacity: int, pinned_for: list[int]) -> None:
    for device in pinned_for:
        _call(library.omni_region_unpin, address, device)
    _call(library.omni_region_unmap, address, capacity)


def cut(memory: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor over bytes [N] of uint8, from `start` on."""
    size = math.prod(shape) * dtype.itemsize
    return memory[start : start + size].view(dtype).view(tuple(shape))


class Reading:
    """Parts of files that are to be read into tensors on the host, all in one go by several threads."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Path, int, Tensor]] = []

    @staticmethod
    def possible() -> bool:
        return _library() is not None

    def add(self, file: Path, offset: int, target: Tensor) -> None:
        """Adds a target [...], contiguous and of any shape, whose bytes begin at `offset`. Only where `possible`."""
        self._pieces.append((file, offset, target))

    def run(self, threads: int = READ_THREADS) -> None:
        """Raises HostLibraryError for a file that cannot be read or is too short."""
        library = _library()
        if library is None or not self._pieces:
            return
        pieces = (_Piece * len(self._pieces))(
            *(
                _Piece(str(file).encode(), offset, target.nbytes, target.data_ptr())
                for file, offset, target in self._pieces
            )
        )
        _call(library.omni_read_pieces, pieces, len(pieces), threads)
        self._pieces.clear()


class Streamer(Protocol):
    """Copies ahead of time. Of each slot, in turns: `copy` begins to fill it once it is free; `wait` makes the current
    stream wait for what is in it; `release` gives it free once that stream has got so far.
    """

    def copy(self, slot: int, target: Tensor, source: Tensor) -> None:
        """Begins to copy source [...] to target [...]: contiguous, of any shape and of equally many bytes."""

    def wait(self, slot: int) -> None: ...

    def release(self, slot: int) -> None: ...


def streamer(device: torch.device, slots: int) -> Streamer:
    """The library's, where it has one for the device, else torch's."""
    library = _library()
    if library is None or (device.type == "cuda" and not load_native().cuda_archs):
        return TorchStreamer(device, slots)
    return NativeStreamer(library, device, slots)


class NativeStreamer:
    """On CUDA a stream of its own; on the CPU a thread."""

    def __init__(self, library: ctypes.CDLL, device: torch.device, slots: int) -> None:
        self._library, self._device = library, device
        self._handle = ctypes.c_void_p()
        _call(library.omni_streamer_open, _number(device), slots, ctypes.byref(self._handle))
        # what may still be copied when nobody else needs it any more
        self._used: list[tuple[Tensor, Tensor] | None] = [None] * slots
        closing = weakref.finalize(self, _close, library, self._handle, self._used)
        closing.atexit = device.type != "cuda"

    def copy(self, slot: int, target: Tensor, source: Tensor) -> None:
        """Queues the copy of source [...], and keeps both tensors alive until the slot is filled anew."""
        assert target.nbytes == source.nbytes
        self._used[slot] = target, source
        _call(self._library.omni_streamer_copy, self._handle, slot, target.data_ptr(), source.data_ptr(), source.nbytes)

    def wait(self, slot: int) -> None:
        _call(self._library.omni_streamer_wait, self._handle, slot, self._stream())

    def release(self, slot: int) -> None:
        _call(self._library.omni_streamer_release, self._handle, slot, self._stream())

    def _stream(self) -> int | None:
        if self._device.type != "cuda":
            return None
        handle: int = torch.cuda.current_stream(self._device).cuda_stream
        return handle


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, used: list[tuple[Tensor, Tensor] | None]) -> None:
    _call(library.omni_streamer_close, handle)
    used.clear()


class TorchStreamer:
    """The same by torch: on the CPU each copy is made at once."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: list[torch.cuda.Event | None] = [None] * slots
        self._free: list[torch.cuda.Event | None] = [None] * slots

    def copy(self, slot: int, target: Tensor, source: Tensor) -> None:
        """Copies source [...] on a stream of its own, or on the CPU before it returns."""
        if self._copies is None:
            target.copy_(source)
            return
        if (free := self._free[slot]) is not None:
            self._copies.wait_event(free)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._copies)
        self._ready[slot] = self._copies.record_event()

    def wait(self, slot: int) -> None:
        if (ready := self._ready[slot]) is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def release(self, slot: int) -> None:
        if self._copies is not None:
            self._free[slot] = torch.cuda.current_stream(self._device).record_event()
