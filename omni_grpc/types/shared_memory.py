"""Bytes that cross a process boundary without being pickled: named shared-memory blocks, put once, taken once.

A block is a file of the shared-memory mount. It is written and read as a file, never mapped: a page of a mapping for
which the mount has no room ends the process with SIGBUS, a write is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

from omni_grpc.types.os_errors import reason
from omni_grpc.types.plan import SharedBytes

logger = logging.getLogger(__name__)

BLOCKS = Path("/dev/shm")
"""Where the blocks are: the mount on which shm_open makes them, too."""
NO_BLOCKS = ""
"""The prefix of a worker that has no memory in common with its engine: what it puts travels in the handle."""


BOOT, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
OWNED = re.compile(r"omni-(?:[a-z]+-)?(\d+)-([0-9a-f]+)-[0-9a-f]{12}-")
"""A block's name: whose process it is, by its id and where that counts, see `_namespace`."""


def own_prefix(kind: str = "") -> str:
    """The beginning of the names of blocks that are this process's, which no other one gives. `kind`: letters that say
    what they are for.
    """
    return f"omni-{kind}{kind and '-'}{os.getpid()}-{_namespace() or '0'}-{secrets.token_hex(6)}-"


def sweep_dead(*, folder: Path = BLOCKS) -> int:
    """Unlinks the blocks of processes that have ended, and says how many: where all of a server were killed at once,
    nobody was left to do it. Those of other machines, containers and users are left alone.
    """
    here, swept = _namespace(), 0
    if not here or not folder.is_dir():
        return 0
    for path in folder.glob("omni-*"):
        owner = OWNED.match(path.name)
        if owner is None or owner[2] != here or Path(f"/proc/{owner[1]}").exists():
            continue
        # another server that starts may be faster
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()
            swept += 1
    if swept:
        logger.warning("freed %d shared-memory blocks of servers that were killed", swept)
    return swept


def _namespace() -> str:
    """What ids of processes are unique in: this boot of this machine, and a container. Empty where it is not known."""
    try:
        return f"{BOOT.read_text('ascii')[:8]}{PROCESSES.stat().st_ino:x}"
    except OSError:
        return ""


def store(data: bytes, name: str, *, folder: Path = BLOCKS) -> None:
    """Copies `data` into a new block. Raises OSError where the mount has no room for it; then there is no block."""
    _write(folder / name, data)


def put(data: bytes, name: str, *, folder: Path = BLOCKS) -> SharedBytes:
    """Copies `data` into a new block. Whoever gets the handle must `take` it, or the block outlives both processes.

    Where the mount has no room for them, or there is no such mount, the bytes travel in the handle itself. That is
    slower by one copy through the pipe for each side, and is logged with the mount and the size.
    """
    try:
        store(data, name, folder=folder)
    except OSError as error:
        logger.warning(
            "no room for a block of %d bytes in %s (%s): it goes through the worker's pipe, which is slower; "
            "give the mount more, with docker run --shm-size for example",
            *(len(data), folder, reason(error)),
        )
        return SharedBytes(name=name, size=len(data), data=data)
    return SharedBytes(name=name, size=len(data))


def hand(data: bytes, prefix: str, number: int) -> SharedBytes:
    """The bytes for whoever reads a worker's reports: in block `number` of the prefix, or in the handle (NO_BLOCKS)."""
    if prefix == NO_BLOCKS:
        return SharedBytes(name=str(number), size=len(data), data=data)
    return put(data, f"{prefix}{number}")


def take(handle: SharedBytes, *, folder: Path = BLOCKS) -> bytes:
    """The bytes of a block, which is gone afterwards. Raises FileNotFoundError where it is gone already."""
    if handle.data is not None:
        return handle.data
    path = folder / handle.name
    try:
        return path.read_bytes()
    finally:
        _remove(path)


def link(name: str, other: str, *, folder: Path = BLOCKS) -> None:
    """Another name for a block, which is there until both are gone. Raises FileNotFoundError where it is gone."""
    _track(folder / other)
    try:
        os.link(folder / name, folder / other)
    except OSError:
        _untrack(folder / other)
        raise


def read(name: str, *, folder: Path = BLOCKS) -> bytes:
    """The bytes of a block, which stays. Raises FileNotFoundError where it is gone."""
    return (folder / name).read_bytes()


def take_all(handles: Sequence[SharedBytes], *, folder: Path = BLOCKS) -> list[bytes]:
    """The bytes of several blocks. Where one is missing the others are gone afterwards, too. Raises like `take`."""
    taken, missing = [], None
    for handle in handles:
        try:
            taken.append(take(handle, folder=folder))
        except OSError as error:
            missing = error
    if missing is not None:
        raise missing
    return taken


def move_all(handles: Sequence[SharedBytes], prefix: str, *, folder: Path = BLOCKS) -> list[SharedBytes]:
    """Gives blocks other names, which begin with `prefix`: whoever sweeps what is left under the old ones finds none.
    Raises FileNotFoundError where one is gone already; then all are.
    """
    moved = []
    try:
        for number, handle in enumerate(handles):
            if handle.data is not None:
                moved.append(handle)
                continue
            old, new = folder / handle.name, folder / f"{prefix}-{number}"
            _track(new)
            try:
                old.rename(new)
            except OSError:
                _untrack(new)
                raise
            _untrack(old)
            moved.append(SharedBytes(name=new.name, size=handle.size))
    except OSError:
        discard_all(handles, folder=folder)
        discard_all(moved, folder=folder)
        raise
    return moved


def pieces(handle: SharedBytes, size: int, *, folder: Path = BLOCKS) -> Iterator[bytes]:
    """The bytes of a block, which stays, at most `size` at once. Raises FileNotFoundError where it is gone."""
    with open(folder / handle.name, "rb", buffering=0) as block:
        while piece := block.read(size):
            yield piece


def discard_all(handles: Sequence[SharedBytes], *, folder: Path = BLOCKS) -> None:
    """As `discard`, for several. Those whose bytes are in the handle have none."""
    for handle in handles:
        if handle.data is None:
            discard(handle.name, folder=folder)


def discard(name: str, *, folder: Path = BLOCKS) -> None:
    """Unlinks a block. One that is gone, or that was never put, is passed over."""
    _remove(folder / name)


def sweep(prefix: str, *, folder: Path = BLOCKS) -> int:
    """Unlinks every block whose name begins with `prefix`: what a dead worker had put and nobody will take."""
    leftovers = list(folder.glob(f"{prefix}*")) if folder.is_dir() else []
    for path in leftovers:
        _remove(path)
    return len(leftovers)


def _write(path: Path, data: bytes) -> None:
    # the tracker unlinks what is left when every process of this server was killed at once
    _track(path)
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        _untrack(path)
        raise
    try:
        with os.fdopen(file, "wb", buffering=0) as block:
            if data:
                # all of it or nothing: without a reservation a block could fail half way, after its copy has begun
                os.posix_fallocate(file, 0, len(data))
            rest = memoryview(data)
            while rest:
                # one call writes at most 2 GiB
                rest = rest[block.write(rest) :]
    except OSError:
        _remove(path)
        raise


def _remove(path: Path) -> None:
    # somebody else may have been faster: a cleanup at the end of a login session, for example
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        _untrack(path)


def _track(path: Path) -> None:
    if path.parent == BLOCKS:
        resource_tracker.register(f"/{path.name}", "shared_memory")


def _untrack(path: Path) -> None:
    if path.parent == BLOCKS:
        resource_tracker.unregister(f"/{path.name}", "shared_memory")
