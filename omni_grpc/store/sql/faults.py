"""What a database says, as a StoreError: what is wrong and how to mend it, in words of our own. Those of drivers name
addresses, users and what is in a row.
"""

from __future__ import annotations

import sqlite3
import ssl
from collections.abc import Mapping

import asyncpg
import sqlalchemy as sa

from omni_grpc.store.seam import StoreError

ERRORS = (
    sa.exc.SQLAlchemyError,
    sqlite3.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""What drivers and SQLAlchemy raise."""

RETRIED = ("40001", "40P01")
"""SQLSTATEs of a transaction that may succeed when it is run again: serialization failure, deadlock."""

# words, and whether it may pass by itself
_SQLITE: Mapping[int, tuple[str, bool]] = {
    sqlite3.SQLITE_FULL: ("the disk of the job store is full: make room on it", True),
    sqlite3.SQLITE_IOERR: (
        "the disk of the job store is full or does not respond as it should: make room, or look at it",
        True,
    ),
    sqlite3.SQLITE_READONLY: ("the job store may not be written: look at the owner and the mode of its folder", False),
    sqlite3.SQLITE_CANTOPEN: ("the file of the job store cannot be opened: look at its folder", False),
    sqlite3.SQLITE_PERM: ("the file of the job store may not be opened: look at its owner and mode", False),
    sqlite3.SQLITE_AUTH: ("the file of the job store may not be opened: look at its owner and mode", False),
    sqlite3.SQLITE_BUSY: ("another program holds the file of the job store: end it, or wait", True),
    sqlite3.SQLITE_LOCKED: ("another program holds the file of the job store: end it, or wait", True),
    sqlite3.SQLITE_CORRUPT: ("the file of the job store is damaged: restore it from a copy, or move it away", False),
    sqlite3.SQLITE_NOTADB: (
        "the file of the job store is no SQLite database: restore it from a copy, or move it away",
        False,
    ),
    sqlite3.SQLITE_NOMEM: ("there is not enough memory for the job store", True),
    sqlite3.SQLITE_TOOBIG: ("a row is larger than SQLite takes", False),
}
# by SQLSTATE, or the first letters of one (https://www.postgresql.org/docs/current/errcodes-appendix.html)
_POSTGRESQL: Mapping[str, tuple[str, bool]] = {
    "53100": ("the disk of the database is full: make room on it", True),
    "53300": ("the database has no connection left: raise its max_connections, or run fewer servers", True),
    "53": ("the database lacks memory or another resource", True),
    "57014": ("the database took too long, and the statement was stopped", True),
    "57": ("the database is starting or going away", True),
    "58": ("the disk of the database does not respond as it should: look at its log", True),
    "08": ("the connection to the database is lost", True),
    "25006": ("the database takes no writes now: it is a standby, or set to read-only", True),
    "28": ("the database does not accept the user or the password of --state-url", False),
    "3D000": ("there is no database of this name: create it, or correct --state-url", False),
    "3F000": ("there is no such schema in the database: create it, or correct --state-url", False),
    "40": ("another server wrote the same rows at the same time", True),
    "42501": ("the user of --state-url may not do this: grant it the rights to the tables and the schema", False),
    "42P01": ("a table of the job store is missing: restore the database from a copy, or give an empty one", False),
    "42P07": (
        "the database has tables of these names that are not ours: give a database or a schema of its own",
        False,
    ),
    "54": ("a row is larger than the database takes", False),
    "55": ("the database is busy with something else on these rows", True),
    "XX": ("the database is damaged: look at its log", False),
}
AWAY = "the database does not answer: look whether it runs and can be reached"


def fault(error: BaseException) -> StoreError:
    """The error to raise for one of ERRORS."""
    origin = cause(error)
    words, retryable = _words(origin)
    return StoreError(words, retryable=retryable)


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of an error of PostgreSQL, or ""."""
    return getattr(cause(error), "sqlstate", None) or ""


def cause(error: BaseException) -> BaseException:
    """The error of the driver itself. SQLAlchemy has two wrappers around it."""
    while isinstance(error, sa.exc.DBAPIError) and error.orig is not None:
        error = error.orig
    if getattr(error, "sqlstate", None) is None and isinstance(error.__cause__, ERRORS):
        return cause(error.__cause__)
    return error


def _words(error: BaseException) -> tuple[str, bool]:
    if (state := getattr(error, "sqlstate", None)) is not None:
        for length in (5, 2):
            if state[:length] in _POSTGRESQL:
                return _POSTGRESQL[state[:length]]
        return f"the database refused a statement (SQLSTATE {state}): look at its log", False
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        unknown = f"SQLite refused a statement ({getattr(error, 'sqlite_errorname', type(error).__name__)})"
        return _SQLITE.get(code, (unknown, False))
    if isinstance(error, ssl.SSLError):
        return "no encrypted connection to the database: look at sslmode and sslrootcert of --state-url", False
    if isinstance(error, sa.exc.TimeoutError):
        return "all connections to the job store are busy", True
    if isinstance(error, OSError | TimeoutError | asyncpg.InterfaceError):
        return AWAY, True
    return f"the job store failed ({type(error).__name__})", False
