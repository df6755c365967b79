"""Blobs as files in a folder of this machine, or of a network file system.

A blob of the name `a/b` is the file `XX/a%2Fb`, where XX are two hex digits of the SHA-256 of its name: a million blobs
are 256 folders of some 4000 files. It is written under a temporary name that no blob can have, and moved to its place
when it is on the disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from omni_grpc.store.blobs.finished import finished
from omni_grpc.store.blobs.names import checked, valid
from omni_grpc.store.blobs.pieces import regrouped
from omni_grpc.store.memory import PIECE_BYTES
from omni_grpc.store.seam import MissingBlob, StoreError
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.os_errors import FULL, plain, reason

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

THREADS = 16
"""Reads and writes that may wait for the disk at once. They are threads of their own: a slow disk holds up nobody who
uses those of the event loop.
"""
STALE_SECONDS = 3600.0
"""A temporary file that nobody has written to for so long is what a killed process left."""
_PROBE_FOLDER = "00"
_PROBE = bytes(4096)
"""What is written to see whether there is room: one block, since an empty file has room on a full disk."""
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = "~"
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EBADF, errno.ENOTSUP})
"""What a file system says whose folders cannot be synced, since it orders their entries by itself."""
_LASTING = frozenset(
    {
        *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOENT, errno.ENOTDIR, errno.ELOOP),
        *(errno.EISDIR, errno.ENAMETOOLONG),
    }
)
"""What does not pass by itself."""


class FolderBlobs:
    """Files below `root`, which only this user may read. It implements `omni_grpc.store.seam.Blobs`.

    Several servers may use one folder. `stale_seconds`: temporary files older than that are removed when it is opened,
    and by `names`.
    """

    durable = True
    immediate = False
    kind = "folder"
    signs = False

    def __init__(self, root: Path, *, stale_seconds: float = STALE_SECONDS) -> None:
        self._root = root
        self._stale_seconds = stale_seconds
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="blobs")

    async def open(self) -> None:
        await self._done(self._open)

    async def close(self) -> None:
        # waits for what is being written, beside the loop
        await asyncio.to_thread(self._threads.shutdown)

    async def put(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        file = _NewFile(self._place(checked(name)), self._root)
        # one thread hop for each MiB, however small the pieces are
        waiting: list[bytes] = []
        size = 0
        try:
            await self._in_thread("write to", file.create)
            async with contextlib.aclosing(regrouped(pieces)) as source:
                async for piece in source:
                    waiting.append(piece)
                    size += len(piece)
                    if size >= PIECE_BYTES:
                        full, waiting, size = waiting, [], 0
                        await self._in_thread("write to", file.write, full)
            await self._in_thread("write to", file.finish, waiting)
            file.close()
        except BaseException:
            await self._done(file.discard)
            raise
        return file.size

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        if not valid(name):
            raise MissingBlob(name)
        # open from its first piece to its last: who deletes or replaces it meanwhile takes nothing from this reader
        file = _OpenFile(name, self._place(name), start, end)
        try:
            await self._in_thread("read from", file.open)
            while piece := await self._in_thread("read from", file.piece):
                yield piece
        finally:
            # here and not in a thread: what was only read has nothing to write when it is closed
            file.close()

    async def delete(self, names: Collection[str]) -> None:
        places = [self._place(name) for name in names if valid(name)]
        await self._in_thread("delete from", _delete, places)

    async def names(self, prefix: str, before: float) -> AsyncIterator[str]:
        for shard in await self._in_thread("read from", self._shards):
            for name in await self._in_thread("read from", self._names_in, shard, prefix, before):
                yield name

    async def signed_url(self, name: str, seconds: float, *, mime_type: str = "", filename: str = "") -> str | None:
        return None

    def _place(self, name: str) -> Path:
        return self._root / _shard(name) / name.replace("/", "%2F")

    async def _done(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Does it beside the loop, and to its end: nothing is closed while a thread uses it."""
        call = functools.partial(function, *args, **kwargs)
        return await finished(asyncio.get_running_loop().run_in_executor(self._threads, call))

    async def _in_thread(self, doing: str, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Does it beside the loop. Raises StoreError for what the system says."""
        try:
            return await self._done(function, *args, **kwargs)
        except OSError as error:
            raise StoreError(
                f"cannot {doing} the folder of outputs: {reason(error)}; {_fix(error)}",
                retryable=error.errno not in _LASTING,
            ) from error

    def _open(self) -> None:
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = _NewFile(self._root / _PROBE_FOLDER / "probe", self._root)
            try:
                probe.create()
                probe.write([_PROBE])
                probe.sync()
            finally:
                probe.discard()
            for shard in self._shards():
                self._names_in(shard, "", float("-inf"))
        except OSError as error:
            raise ConfigError(
                f"artifact_url: cannot keep outputs in {self._root}: {reason(error)}; {_fix(error)}"
            ) from error

    def _shards(self) -> list[Path]:
        return sorted(path for path in self._root.iterdir() if _SHARD.fullmatch(path.name))

    def _names_in(self, shard: Path, prefix: str, before: float) -> list[str]:
        """The names of the blobs in one of the 256 folders; what killed processes left there is removed."""
        oldest = time.time() - self._stale_seconds
        found: list[str] = []
        stale: list[str] = []
        with os.scandir(shard) as entries:
            for entry in entries:
                name = entry.name.replace("%2F", "/")
                temporary = name.startswith(_TEMPORARY)
                # whatever else somebody has put there is nobody's blob
                if not temporary and not (name.startswith(prefix) and valid(name) and _shard(name) == shard.name):
                    continue
                when = _modified(entry)
                if when is not None and when < (oldest if temporary else before):
                    (stale if temporary else found).append(name)
        for name in stale:
            shard.joinpath(name).unlink(missing_ok=True)
        return found


class _NewFile:
    """A blob that is being written, under a temporary name beside its place. Everything here blocks."""

    def __init__(self, place: Path, root: Path) -> None:
        self._place = place
        self._root = root
        self._part = place.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        self._file: int | None = None
        self._placed = False
        self.size = 0

    def create(self) -> None:
        if not self._place.parent.exists():
            self._place.parent.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(self._root)
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self.size += len(piece)

    def sync(self) -> None:
        # the time of this machine, by which `names` is asked: that of a network file system may be another
        now = time.time_ns()
        os.utime(self._descriptor, ns=(now, now))
        os.fsync(self._descriptor)

    def finish(self, last: Iterable[bytes]) -> None:
        """Writes the rest, and moves it to its place once it is on the disk."""
        self.write(last)
        self.sync()
        self._part.replace(self._place)
        self._placed = True
        _sync_folder(self._place.parent)

    def close(self) -> None:
        """Of a blob that is in its place."""
        os.close(self._descriptor)
        self._file = None

    def discard(self) -> None:
        """Removes what was written, wherever it is."""
        try:
            if self._placed and self._is_ours():
                self._place.unlink(missing_ok=True)
            self._part.unlink(missing_ok=True)
        except OSError as error:
            # what went wrong before is what the caller is told
            logger.warning("an unfinished output is left in its folder: %s", plain(error))
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    @property
    def _descriptor(self) -> int:
        assert self._file is not None
        return self._file

    def _is_ours(self) -> bool:
        """Whether no other blob of the same name has replaced it."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), self._place.stat())
        except FileNotFoundError:
            return False


class _OpenFile:
    """A part of a blob that is being read. Everything but `close` blocks."""

    def __init__(self, name: str, place: Path, start: int, end: int | None) -> None:
        self._name = name
        self._place = place
        self._at = start
        self._end = end
        self._file: int | None = None

    def open(self) -> None:
        try:
            self._file = os.open(self._place, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingBlob(self._name) from None
        size = os.fstat(self._file).st_size
        self._end = size if self._end is None else min(self._end, size)

    def piece(self) -> bytes:
        """The next one; empty at the end."""
        assert self._file is not None
        assert self._end is not None
        wanted = min(PIECE_BYTES, self._end - self._at)
        if wanted <= 0:
            return b""
        piece = os.pread(self._file, wanted, self._at)
        if not piece:
            raise StoreError("an output's file has become shorter while it was read; see to its disk", retryable=False)
        self._at += len(piece)
        return piece

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _shard(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:2]


def _delete(places: Collection[Path]) -> None:
    for place in places:
        place.unlink(missing_ok=True)


def _modified(entry: os.DirEntry[str]) -> float | None:
    """When a file was written last, in Unix seconds; None where it is no file, or none any more."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns / 1e9 if stat.S_ISREG(found.st_mode) else None


def _sync_folder(folder: Path) -> None:
    """Makes names that have come or gone outlive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _fix(error: OSError) -> str:
    """What to do about it."""
    match error.errno:
        case number if number in FULL:
            return "free some space, or keep outputs for a shorter time (--retention, --artifact-budget)"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "let the user of the server write there, or name another folder (--artifact-url)"
        case errno.ENOENT | errno.ENOTDIR:
            return "make or mount it again, or name another folder (--artifact-url)"
        case errno.EMFILE | errno.ENFILE | errno.ENOMEM | errno.EAGAIN:
            return "try again later"
    return "see to its disk, or name another folder (--artifact-url)"
