"""Stores of every kind: `store` is one, and `stores` makes others on the same rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.seam import Store
from omni_grpc.store.sql import SqlStore, tables
from tests.store.postgres import Postgres, new_database, outside
from tests.store.postgres import postgres as postgres

KINDS = ("memory", "sqlite", "postgresql")
Opening = Callable[[], Awaitable[Store]]


@pytest.fixture(scope="session")
def migrated(postgres: Postgres) -> str:
    """The URL of a database with tables, for tests that leave it as they found it."""
    url = new_database(postgres)

    async def migrate() -> None:
        store = SqlStore.postgresql(url)
        await store.open()
        await store.close()

    outside(migrate())
    return url


async def empty(store: SqlStore) -> None:
    """Without a row."""

    def work(connection: sa.Connection) -> None:
        for table in tables.METADATA.sorted_tables:
            connection.execute(sa.delete(table))

    await store._database.write(work)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def opening(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opening]:
    """Opens a store on the same rows each time; all are closed in the end."""
    opened: list[Store] = []
    memory = MemoryStore()

    async def again() -> Store:
        store: Store
        if kind == "memory":
            store = memory
        elif kind == "sqlite":
            store = SqlStore.sqlite(tmp_path / "state" / "jobs.db")
        else:
            store = SqlStore.postgresql(request.getfixturevalue("migrated"))
        await store.open()
        opened.append(store)
        return store

    if kind == "postgresql":
        request.getfixturevalue("migrated")
    yield again
    if opened and isinstance(opened[0], SqlStore) and kind == "postgresql":
        await empty(opened[0])
    for store in opened:
        await store.close()


@pytest.fixture
async def store(opening: Opening) -> Store:
    return await opening()
