"""A database of PostgreSQL, for any number of servers."""

from __future__ import annotations

import logging
import re
from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from omni_grpc.types.errors import ConfigError

CONNECTIONS = 8
"""Of one server, beside the one that listens."""
HOST = r"([\w.-]+|\[[\da-fA-F:.]+\])?(:\d+)?"
MALFORMED = (
    "--state-url is not an address of PostgreSQL; percent-encode what is special in the password (@ is %40, / is %2F)"
)
SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")

logger = logging.getLogger(__name__)


class Address:
    """Where a database is: `postgresql://user:password@host:port/name?sslmode=verify-full`, as libpq has it. What it
    does not say, the variables PGHOST, PGUSER, PGPASSWORD, PGPASSFILE and so on do.
    """

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout`: seconds that a connection and each statement may take. Raises ConfigError."""
        scheme, separator, rest = url.partition("://")
        if scheme not in SCHEMES or not separator:
            raise ConfigError(
                f"--state-url: {scheme if separator else 'it'!r} is no database that can be used; give"
                " postgresql://USER:PASSWORD@HOST/DATABASE, or --state-dir for a file of SQLite"
            )
        self._dsn = f"postgresql://{rest}"
        self._timeout = timeout
        self.name = _name(self._dsn)

    async def connect(self) -> Any:
        """A connection of asyncpg. Raises ConfigError for an address that is none."""
        try:
            return await asyncpg.connect(
                self._dsn,
                timeout=self._timeout,
                command_timeout=self._timeout,
                server_settings={"application_name": "omni_grpc"},
            )
        except (ValueError, asyncpg.ClientConfigurationError) as error:
            # its text may quote the password
            raise ConfigError(f"{MALFORMED} [{type(error).__name__}]") from None

    def engine(self) -> AsyncEngine:
        return create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self.connect,
            # a connection is tried before it is used, since the database may have been started anew
            pool_pre_ping=True,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=self._timeout,
            hide_parameters=True,
        )


def prepare(connection: sa.Connection) -> str:
    """The schema in which the tables are. Warns of a database that forgets what it has committed."""
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        if connection.scalar(sa.text(f"SHOW {setting}")) == "off":
            logger.warning(
                "the database of --state-url has %s=off: jobs that were accepted can be lost when it crashes", setting
            )
    return connection.scalar(sa.select(sa.func.current_schema())) or ""


def _name(dsn: str) -> str:
    """Hosts and database, without user and password. Raises ConfigError for an address of which it cannot be said what
    is a password and what is not.
    """
    found = re.fullmatch(r"postgresql://(?:[^/?#]*@)?([^/?#@]*)(/[^/?#@]*)?(\?[^@#]*)?", dsn)
    if found is None or not re.fullmatch(rf"{HOST}(,{HOST})*", found[1]):
        raise ConfigError(MALFORMED)
    return f"postgresql://{found[1]}{found[2] or ''}"
