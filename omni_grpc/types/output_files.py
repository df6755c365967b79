"""Files that the user asked for: written whole or not at all, and checked before the work whose result they hold."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from omni_grpc.types.errors import FailedPrecondition, OmniError, ResourceExhausted
from omni_grpc.types.os_errors import FULL, reason

_PROBE = bytes(4096)
"""What is written to see whether there is room: one block, since an empty file has room on a full disk."""


def check_writable(path: Path) -> None:
    """Raises what `write_file` would raise, as far as it can be known before there is anything to write."""
    try:
        target = _target(path)
        if _is_stream(target):
            with target.open("ab"):
                return
        part = _part(target)
        _write(part, _PROBE)
        part.unlink()
    except OSError as error:
        raise not_written(path, error) from error


def write_file(path: Path, data: bytes) -> None:
    """Writes a file of the user's. It is written beside its place and moved there, so that what was there stays whole
    until the new file is; a link stays a link, and a device or pipe is written as it is.

    Raises ResourceExhausted (DISK_FULL) where there is no room, FailedPrecondition (FILE_NOT_WRITTEN) for any other
    reason. No part of the file is left then.
    """
    try:
        target = _target(path)
        if _is_stream(target):
            with target.open("ab", buffering=0) as stream:
                _all(stream.fileno(), data)
            return
        part = _part(target)
        _write(part, data)
        try:
            if target.exists():
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            part.replace(target)
        except BaseException:
            part.unlink()
            raise
    except OSError as error:
        raise not_written(path, error) from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """As `write_file`, for what is written little by little: a file to write to, which takes its place at the end of
    the block. Nothing is left of it if the block is left by an error.
    """
    try:
        target = _target(path)
        if _is_stream(target):
            with target.open("ab") as stream:
                yield stream
            return
        part = _part(target)
        try:
            with part.open("xb") as stream:
                yield stream
            if target.exists():
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> OmniError:
    """The error for a file that cannot be written: where, why, and what to do."""
    where, metadata = f"cannot write {path}: {reason(error)}", {"path": str(path)}
    if error.errno in FULL:
        message = f"{where}; free some space, or name a file on another disk"
        return ResourceExhausted(message, reason="DISK_FULL", metadata=metadata)
    message = f"{where}; name a file in a folder that exists and can be written"
    return FailedPrecondition(message, reason="FILE_NOT_WRITTEN", metadata=metadata)


def _target(path: Path) -> Path:
    """The file that a link leads to, or the file itself. Raises IsADirectoryError for a folder."""
    target = path.resolve() if path.is_symlink() else path
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    return target


def _is_stream(target: Path) -> bool:
    """Whether it is a device or a pipe, in whose place no file may be put."""
    return target.exists() and not target.is_file()


def _part(target: Path) -> Path:
    """A new name beside a file, short since the file's own may be as long as names can be."""
    return target.with_name(f".{secrets.token_hex(6)}.part")


def _write(part: Path, data: bytes) -> None:
    """Writes a new file, which nothing is left of if that fails."""
    # the mode that any new file gets, which a temporary file would not have
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _all(file, data)
    except BaseException:
        part.unlink()
        raise
    finally:
        os.close(file)


def _all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
