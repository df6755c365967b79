"""A store in a database: a file of SQLite, or PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.records import Counts
from omni_grpc.store.seam import StoreError
from omni_grpc.store.sql import codec, postgresql, sqlite, tables, upgrade
from omni_grpc.store.sql.adapters import SqlAdapters
from omni_grpc.store.sql.database import Database
from omni_grpc.store.sql.deliveries import SqlDeliveries
from omni_grpc.store.sql.files import SqlFiles
from omni_grpc.store.sql.jobs import SqlJobs
from omni_grpc.store.sql.notices import Channel
from omni_grpc.store.sql.servers import SqlServers
from omni_grpc.types.errors import ConfigError

TIMEOUT = 10.0
"""Seconds after which a caller no longer waits for a database."""
UPGRADE_TIMEOUT = 3600.0
"""Seconds that a server waits for the migrations, its own or another server's."""


class SqlStore:
    """It implements `omni_grpc.store.seam.Store`. Made by `sqlite` or `postgresql`, and used once it is open."""

    durable = True
    immediate = False

    def __init__(
        self,
        database: Database,
        upgrading: Database,
        *,
        name: str,
        channel: Channel | None = None,
        file: sqlite.File | None = None,
    ) -> None:
        """`upgrading` is the same database for a caller who waits longer."""
        self._database = database
        self._upgrading = upgrading
        self._channel = channel
        self._file = file
        self.shared = file is None
        self.kind = "postgresql" if file is None else "sqlite"
        self.name = name
        self.jobs = SqlJobs(database)
        self.files = SqlFiles(database)
        self.servers = SqlServers(database, channel)
        self.deliveries = SqlDeliveries(database)
        self.adapters = SqlAdapters(database)

    @classmethod
    def sqlite(cls, path: Path, *, timeout: float = TIMEOUT) -> SqlStore:
        """In a file, which one server at a time can have. `timeout`: seconds that a call takes at most."""
        readers, writers = sqlite.engines(path, timeout)
        database = Database(readers, writers, timeout=timeout, abandons=False)
        upgrading = Database(readers, writers, timeout=UPGRADE_TIMEOUT, abandons=False)
        return cls(database, upgrading, name=f"SQLite {path}", file=sqlite.File(path))

    @classmethod
    def postgresql(cls, url: str, *, timeout: float = TIMEOUT) -> SqlStore:
        """In a database that several servers can have. Raises ConfigError for a URL that is none."""
        address = postgresql.Address(url, timeout)
        engine = address.engine()
        readers = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        database = Database(readers, engine, timeout=timeout, abandons=True)
        patient = postgresql.Address(url, UPGRADE_TIMEOUT).engine()
        upgrading = Database(patient, patient, timeout=UPGRADE_TIMEOUT, abandons=True)
        return cls(database, upgrading, name=address.name, channel=Channel(address.connect, timeout))

    async def open(self) -> None:
        """Raises ConfigError where it cannot be used."""
        try:
            if self._file is not None:
                self._file.take()
            await self._bring_up()
        except StoreError as error:
            await self.close()
            raise ConfigError(f"{self.name}: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self._database.close()
        if self._file is not None:
            self._file.leave()

    async def counts(self) -> Counts:
        tables_of = {"jobs": tables.jobs, "artifacts": tables.artifacts, "assets": tables.assets}
        counted = {name: _count(table) for name, table in tables_of.items()}
        counted["owed"] = _count(tables.deliveries).where(tables.PENDING)
        select = sa.select(*(count.scalar_subquery().label(name) for name, count in counted.items()))
        row = await self._database.read(lambda connection: connection.execute(select).one())
        return Counts(**row._mapping)

    async def _bring_up(self) -> None:
        await asyncio.to_thread(codec.prepare)
        if await self._database.read(upgrade.version) != upgrade.NEWEST:
            try:
                await self._upgrading.write(upgrade.upgrade)
            finally:
                await self._upgrading.close()
        if self._channel is not None:
            self._channel.open(await self._database.read(postgresql.prepare))
        else:
            await self.servers.end_all()


def _count(table: sa.Table) -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(table)
