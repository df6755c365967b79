"""Loaded LoRA adapters in a database."""

from __future__ import annotations

import dataclasses
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.records import AdapterRow, AdapterSource
from omni_grpc.store.sql import tables
from omni_grpc.store.sql.database import Database
from omni_grpc.store.sql.dialect import insert

adapters = tables.adapters


class SqlAdapters:
    """It implements `omni_grpc.store.seam.AdapterRows`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, row: AdapterRow) -> AdapterRow:
        columns = dataclasses.asdict(row) | {"source": row.source.value, "pinned": int(row.pinned)}
        there = sa.select(adapters).where(adapters.c.model == row.model, adapters.c.lora_id == row.lora_id)

        def work(connection: sa.Connection) -> AdapterRow:
            insert(connection, adapters, [columns])
            return _row(connection.execute(there).one())

        return await self._database.write(work)

    async def all(self) -> list[AdapterRow]:
        select = sa.select(adapters).order_by(adapters.c.create_time, adapters.c.model, adapters.c.lora_id)
        found = await self._database.read(lambda connection: connection.execute(select).all())
        return [_row(row) for row in found]

    async def delete(self, row: AdapterRow) -> bool:
        key = (adapters.c.model == row.model, adapters.c.lora_id == row.lora_id, adapters.c.uid == row.uid)
        statement = sa.delete(adapters).where(*key)
        return await self._database.write(lambda connection: bool(connection.execute(statement).rowcount))


def _row(row: sa.Row[Any]) -> AdapterRow:
    return AdapterRow(**{**row._mapping, "source": AdapterSource(row.source), "pinned": bool(row.pinned)})
