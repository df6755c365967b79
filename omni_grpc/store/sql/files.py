"""Rows of outputs and uploads in a database."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from omni_grpc.store.records import ArtifactRow, Asset, Cause, Position
from omni_grpc.store.sql import rows, tables
from omni_grpc.store.sql.database import Database
from omni_grpc.store.sql.dialect import replace
from omni_grpc.store.sql.jobs import owned, remember

artifacts, assets, gone = tables.artifacts, tables.assets, tables.gone


class SqlFiles:
    """It implements `omni_grpc.store.seam.FileRows`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def artifact(self, artifact_id: str) -> ArtifactRow | None:
        select = sa.select(artifacts).where(artifacts.c.artifact_id == artifact_id)
        row = await self._database.read(lambda connection: connection.execute(select).one_or_none())
        return None if row is None else rows.artifact(row)

    async def artifacts(
        self, *, tenant: str | None = None, job_id: str = "", after: Position | None = None, limit: int = 50
    ) -> list[ArtifactRow]:
        place = artifacts.c.create_time, artifacts.c.artifact_id
        select = sa.select(artifacts).order_by(*(column.desc() for column in place)).limit(limit)
        if tenant is not None:
            select = select.where(artifacts.c.tenant == tenant)
        if job_id:
            select = select.where(artifacts.c.job_id == job_id)
        if after is not None:
            select = select.where(sa.tuple_(*place) < sa.tuple_(*after))
        found = await self._database.read(lambda connection: connection.execute(select).all())
        return [rows.artifact(row) for row in found]

    async def delete_artifact(self, artifact_id: str, cause: Cause) -> bool:
        return await self._delete(artifacts.c.artifact_id, artifact_id, cause)

    async def artifact_bytes(self) -> Mapping[str, int]:
        return await self._bytes(artifacts)

    async def put_asset(self, asset: Asset) -> None:
        await self._database.write(lambda connection: replace(connection, assets, dataclasses.asdict(asset)))

    async def asset(self, asset_id: str) -> Asset | None:
        select = sa.select(assets).where(assets.c.id == asset_id)
        row = await self._database.read(lambda connection: connection.execute(select).one_or_none())
        return None if row is None else rows.asset(row)

    async def touch_asset(self, asset_id: str, expire_time: float) -> None:
        moved = sa.update(assets).where(assets.c.id == asset_id).values(expire_time=expire_time)
        await self._database.write(lambda connection: connection.execute(moved))

    async def delete_asset(self, asset_id: str, cause: Cause) -> bool:
        return await self._delete(assets.c.id, asset_id, cause)

    async def expired_assets(self, now: float, limit: int) -> list[str]:
        select = sa.select(assets.c.id).where(assets.c.expire_time <= now)
        select = select.order_by(assets.c.expire_time, assets.c.id).limit(limit)
        return await self._database.read(lambda connection: list(connection.scalars(select)))

    async def asset_bytes(self) -> Mapping[str, int]:
        return await self._bytes(assets)

    async def cause(self, name: str) -> tuple[Cause, str] | None:
        select = sa.select(gone).where(gone.c.name == name)
        row = await self._database.read(lambda connection: connection.execute(select).one_or_none())
        return None if row is None else (Cause(row.cause), row.tenant)

    async def forget_names(self, before: float) -> None:
        await self._database.write(lambda connection: connection.execute(sa.delete(gone).where(gone.c.time < before)))

    async def owned(self, blobs: Sequence[str]) -> set[str]:
        return await self._database.read(lambda connection: owned(connection, blobs))

    async def _delete(self, key: sa.Column[str], name: str, cause: Cause) -> bool:
        def work(connection: sa.Connection) -> bool:
            tenant = connection.scalar(sa.select(key.table.c.tenant).where(key == name))
            if tenant is None or not connection.execute(sa.delete(key.table).where(key == name)).rowcount:
                return False
            remember(connection, [(name, tenant)], cause)
            return True

        return await self._database.write(work)

    async def _bytes(self, table: sa.Table) -> Mapping[str, int]:
        select = sa.select(table.c.tenant, sa.func.sum(table.c.size_bytes)).group_by(table.c.tenant)
        found = await self._database.read(lambda connection: connection.execute(select).all())
        # PostgreSQL sums to a Decimal
        return {tenant: int(held) for tenant, held in found}
