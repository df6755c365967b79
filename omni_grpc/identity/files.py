"""Files that are read again when they change, without a call that waits for more than that."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from omni_grpc.types.errors import ConfigError
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY = 1.0
"""Seconds between two looks whether a file has changed."""

Stamp = tuple[int, ...]


def stamp_of(path: Path) -> Stamp | None:
    """What differs once a file is replaced, written to or given another mode; None where there is none. Follows
    links.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def guarded_text(path: Path, *, forbidden: int, risk: str, fix: str) -> str:
    """The text of a file whose mode has none of the bits `forbidden`. Raises ValueError, in words for its owner, for
    one that has (`risk` says what that lets others do, `fix` the mode to give it) and for what is no UTF-8; OSError.
    """
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & forbidden:
            raise ValueError(f"{path} {risk.format(mode=f'(mode {stat.S_IMODE(mode):o})')}: chmod {fix} {path}")
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text, at byte {error.start}") from None


class Reloaded(Generic[T]):
    """What `read` makes of a file.

    It raises ConfigError or OSError for one that it cannot use: at the start to the caller, later to the log, and
    what was read before stays.
    """

    def __init__(self, path: Path, read: Callable[[Path], T], *, look_every: float = LOOK_EVERY) -> None:
        self.path = path
        self._read = read
        self._look_every = look_every
        self._stamp = stamp_of(path)
        self._looked = time.monotonic()
        self._reading: asyncio.Task[None] | None = None
        self._value = read(path)

    @property
    def value(self) -> T:
        """What the file said when it was looked at last."""
        return self._value

    async def current(self, *, look: bool = False) -> T:
        """What the file says, as of `look_every` seconds ago or later; as of now with `look`."""
        now = time.monotonic()
        if self._reading is None and (look or now - self._looked >= self._look_every):
            self._looked = now
            stamp = stamp_of(self.path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reading = asyncio.create_task(self._replace())
        if self._reading is not None:
            # shielded, since it is not this call's alone
            await asyncio.shield(self._reading)
        return self._value

    async def _replace(self) -> None:
        try:
            self._value = await asyncio.to_thread(self._read, self.path)
            logger.info("%s has changed and was read again", self.path)
        except (ConfigError, OSError) as error:
            logger.error("%s has changed and cannot be used, so what it said before stays: %s", self.path, plain(error))
        finally:
            self._reading = None
