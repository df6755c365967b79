"""A database in a file, for one server."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.sql.threads import Threads
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.os_errors import plain

READERS = 4
"""Connections that read at the same time, beside the one that writes."""
PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # a commit is on the disk when it returns. NORMAL would lose the newest ones with the machine, not with the process
    "PRAGMA synchronous=FULL",
    "PRAGMA journal_size_limit=67108864",
    "PRAGMA temp_store=MEMORY",
)
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


class File:
    """The file of a database, which one process has until it ends or lets go. What says so is a lock of the operating
    system on another file beside it: SQLite would let several processes in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def take(self) -> None:
        """Makes the file and its folder where they are missing. Nobody else may read them, nor what SQLite puts beside
        the file, which gets its mode. Raises ConfigError where it cannot be had.
        """
        try:
            self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._lock = _open(self.path.with_name(self.path.name + ".lock"))
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # SQLite locks this one too, and a process that closes a file loses its locks: only before it is used
            os.close(_open(self.path))
        except BlockingIOError:
            self.leave()
            raise ConfigError(
                f"{self.path} is in use by another server: give this one a --state-dir of its own, or both the same"
                " --state-url postgresql://..."
            ) from None
        except OSError as error:
            self.leave()
            raise ConfigError(f"{self.path}: {plain(error)}; give a --state-dir that this user can write to") from None

    def leave(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE_FILE:
        os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor


def engines(path: Path, timeout: float) -> tuple[Threads, Threads]:
    """One that reads and one that writes. Half of `timeout` (seconds) is for programs that hold the file."""
    return _engine(path, READERS, "BEGIN", timeout), _engine(path, 1, "BEGIN IMMEDIATE", timeout)


def _engine(path: Path, connections: int, begin: str, timeout: float) -> Threads:
    engine = sa.create_engine(
        sa.URL.create("sqlite+pysqlite", database=str(path)),
        pool_size=connections,
        max_overflow=0,
        pool_timeout=timeout,
        hide_parameters=True,
        # the driver begins no transactions by itself
        connect_args={"isolation_level": None, "timeout": timeout / 2},
    )

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        for pragma in PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def began(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    return Threads(engine, connections)
