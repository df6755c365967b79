"""Places where servers keep their jobs: `lasting` is one of each kind, `shared` one for several servers at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omni_grpc.store.sql import SqlStore
from tests.lasting.lives import Place, place
from tests.store.postgres import Postgres, new_database, outside
from tests.store.postgres import postgres as postgres


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    """The name of a database with tables, from which others are copied."""
    url = new_database(postgres)

    async def migrate() -> None:
        store = SqlStore.postgresql(url)
        await store.open()
        await store.close()

    outside(migrate())
    return url.partition("?")[0].rpartition("/")[2]


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def lasting(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    url = ""
    if kind == "postgresql":
        url = await request.getfixturevalue("postgres").create(request.getfixturevalue("template"))
    async with place(kind, tmp_path, url) as found:
        yield found


@pytest.fixture
async def shared(postgres: Postgres, template: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with place("postgresql", tmp_path, await postgres.create(template)) as found:
        yield found


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Place]:
    """A folder for one server."""
    async with place("sqlite", tmp_path) as found:
        yield found
