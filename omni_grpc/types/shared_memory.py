"""Bytes that cross a process boundary without being pickled: named shared-memory blocks, put once, taken once."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from omni_grpc.types.plan import SharedBytes

_BLOCKS = Path("/dev/shm")


def put(data: bytes, name: str) -> SharedBytes:
    """Copies `data` into a new block. Whoever gets the handle must `take` it, or the block outlives both processes."""
    # an empty block is refused by the operating system
    block = SharedMemory(name=name, create=True, size=max(1, len(data)))
    try:
        _view(block)[: len(data)] = data
    finally:
        block.close()
    return SharedBytes(name=name, size=len(data))


def take(handle: SharedBytes) -> bytes:
    """The bytes of a block, which is gone afterwards."""
    block = SharedMemory(name=handle.name)
    try:
        return bytes(_view(block)[: handle.size])
    finally:
        block.close()
        block.unlink()


def sweep(prefix: str) -> int:
    """Unlinks every block whose name begins with `prefix`: what a dead worker had put and nobody will take."""
    leftovers = [path.name for path in _BLOCKS.glob(f"{prefix}*")] if _BLOCKS.is_dir() else []
    for name in leftovers:
        block = SharedMemory(name=name)
        block.close()
        block.unlink()
    return len(leftovers)


def _view(block: SharedMemory) -> memoryview:
    # the type is optional because `close` clears it
    assert block.buf is not None
    return block.buf
