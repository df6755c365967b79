"""The file of the audit log. Lines go through a bounded queue to one thread, so that no disk holds up a call."""

from __future__ import annotations

import collections
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from typing import Any

from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

STDOUT = "-"
MOST_WAITING = 10_000
"""Lines, of some 300 bytes each, that wait for a file that cannot be written. Further ones are lost, and counted."""
RETRY = 1.0
"""Seconds between two attempts at a file that cannot be written."""
LAST = 5.0
"""Seconds that the lines which still wait get when the log is closed."""

Line = Mapping[str, Any]


class AuditFile:
    """Appends JSON lines to a file, in order, each of them whole.

    A file that was moved or removed is made anew. What cannot be written now is written later; the log of the server
    says once that it waits, and the file itself how many lines are missing, in the place where they are.
    """

    def __init__(self, path: str, first: Line) -> None:
        """Opens the file and writes the `first` line. Raises ConfigError where that cannot be done."""
        self._path = path
        self._lines: collections.deque[Line] = collections.deque()
        self._lost = 0
        self._written = 0
        self._asked = self._closing = self._failing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        try:
            self._descriptor = self._open()
            self._put(first)
        except OSError as error:
            raise _refused(
                f"--audit-log {path} cannot be written: {plain(error)}. Name a file that this user may write, on a "
                "disk with room, or - for standard output"
            ) from error

    def write(self, line: Line) -> None:
        """Adds a line. Returns at once, and never fails."""
        with self._changed:
            if len(self._lines) >= MOST_WAITING or self._closing:
                if not self._lost:
                    logger.error("the audit log %s is behind by %d lines: from now on lines are lost", *self._behind)
                self._lost += 1
                return
            self._count_lost()
            self._lines.append(line)
            self._wake()

    def reopen(self) -> None:
        """Goes on in a file of the same name that is opened now, for tools that move the old one away."""
        with self._changed:
            self._asked = True
            self._wake()

    def close(self, last: Line) -> None:
        """Writes what waits and a `last` line, for as long as `LAST` seconds. Blocks."""
        self.write(last)
        with self._changed:
            self._closing = True
            self._count_lost()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(LAST)
        if self._lines:
            logger.error("the audit log %s was closed without its last %d lines", *self._behind)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._descriptor)

    @property
    def _behind(self) -> tuple[str, int]:
        return self._path, len(self._lines)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _count_lost(self) -> None:
        if self._lost:
            self._lines.append({"time": stamp(), "action": "LinesLost", "lines": self._lost})
            self._lost = 0

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._asked or self._closing)
                line = self._lines[0] if self._lines else None
                if line is None and self._closing:
                    return
            try:
                self._follow()
                if line is not None:
                    self._put(line)
            except (OSError, ConfigError) as error:
                if not self._wait(error):
                    return
                continue
            with self._changed:
                if line is not None:
                    self._lines.popleft()
            if self._failing:
                self._failing = False
                logger.warning("the audit log %s can be written again", self._path)

    def _wait(self, error: Exception) -> bool:
        """Waits before the next attempt; False where there is none."""
        if not self._failing:
            self._failing = True
            logger.error(
                "the audit log %s cannot be written: %s. Up to %d lines wait until it can, and further ones are lost",
                self._path,
                plain(error),
                MOST_WAITING,
            )
        with self._changed:
            return not self._changed.wait_for(lambda: self._closing, RETRY)

    def _follow(self) -> None:
        """Opens the file again where that was asked for, or where another one, or none, has its name."""
        if self._path == STDOUT:
            self._asked = False
            return
        if not self._asked:
            try:
                found, held = os.stat(self._path), os.fstat(self._descriptor)
                if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                    return
            except FileNotFoundError:
                logger.info("the audit log %s was moved away: it is made anew", self._path)
        fresh = self._open()
        os.close(self._descriptor)
        self._descriptor, self._written, self._asked = fresh, 0, False

    def _open(self) -> int:
        """Raises OSError, and ConfigError for what is no file or may be changed by others."""
        if self._path == STDOUT:
            return os.dup(1)
        # without O_NONBLOCK the opening of a pipe would wait for its reader
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o600)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) and not mode & (stat.S_IWGRP | stat.S_IWOTH):
            return descriptor
        os.close(descriptor)
        if stat.S_ISREG(mode):
            raise _refused(f"--audit-log {self._path} can be changed by others: run `chmod go-w {self._path}`")
        raise _refused(f"--audit-log {self._path} is no regular file: name one, or - for standard output")

    def _put(self, line: Line) -> None:
        """Writes a line, or the rest of it. Raises OSError."""
        data = json.dumps(line).encode() + b"\n"
        while self._written < len(data):
            self._written += os.write(self._descriptor, data[self._written :])
        self._written = 0


def stamp() -> str:
    """This moment, in UTC to the millisecond."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"


def _refused(message: str) -> ConfigError:
    return ConfigError(message, reason="BAD_AUDIT_LOG", violations=(Violation("audit_log", message),))
