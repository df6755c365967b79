"""Servers, and who has which job, in a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import sqlalchemy as sa

from omni_grpc.store.seam import Notice
from omni_grpc.store.sql import tables
from omni_grpc.store.sql.database import Database
from omni_grpc.store.sql.dialect import replace
from omni_grpc.store.sql.notices import Channel

ENDED = 0.0
"""The time until which a server was alive that has said that it ends."""

jobs, servers = tables.jobs, tables.servers


class SqlServers:
    """It implements `omni_grpc.store.seam.Servers`. `channel` None: there are no other servers."""

    def __init__(self, database: Database, channel: Channel | None = None) -> None:
        self._database = database
        self._channel = channel

    async def now(self) -> float:
        if self._channel is None:
            # there is no other server to agree with
            return time.time()
        clock = sa.select(sa.func.extract("epoch", sa.func.clock_timestamp()))
        return await self._database.read(lambda connection: float(connection.execute(clock).scalar_one()))

    async def beat(self, server: str, now: float, until: float) -> bool:
        def work(connection: sa.Connection) -> bool:
            beaten = sa.update(servers).where(servers.c.name == server).values(until=until)
            known = bool(connection.execute(beaten).rowcount)
            if not known:
                replace(connection, servers, {"name": server, "until": until})
            return known

        return await self._database.write(work)

    async def leave(self, server: str) -> None:
        left = sa.update(servers).where(servers.c.name == server).values(until=ENDED)
        await self._database.write(lambda connection: connection.execute(left))

    async def take_over(self, server: str, now: float, *, models: Collection[str] = ()) -> list[str]:
        def work(connection: sa.Connection) -> list[str]:
            dead = sa.select(servers.c.name).where(servers.c.until < now, servers.c.name != server)
            names = list(connection.scalars(dead.order_by(servers.c.name).with_for_update(skip_locked=True)))
            # of one that is in no row, such as one that others took everything from and that has then made a job
            known = set(connection.scalars(sa.select(servers.c.name)))
            having = set(connection.scalars(sa.select(jobs.c.server).where(tables.UNFINISHED).distinct()))
            names += sorted(having - known - {server})
            if not names:
                return []
            moved = sa.update(jobs).where(jobs.c.server.in_(names), tables.UNFINISHED)
            if models:
                moved = moved.where(jobs.c.model.in_(models))
            moved = moved.values(server=server, restarts=jobs.c.restarts + 1)
            taken = connection.execute(moved.returning(jobs.c.create_time, jobs.c.id)).all()
            connection.execute(sa.delete(servers).where(servers.c.name.in_(names)))
            return [row.id for row in sorted(taken)]

        return await self._database.write(work)

    async def alive(self, now: float) -> list[str]:
        select = sa.select(servers.c.name).where(servers.c.until >= now).order_by(servers.c.name)
        return await self._database.read(lambda connection: list(connection.scalars(select)))

    async def end_all(self) -> None:
        """Whatever servers there were have ended: for a database that one server alone can have."""
        await self._database.write(lambda connection: connection.execute(sa.update(servers).values(until=ENDED)))

    def listen(self, hear: Callable[[Notice], None]) -> None:
        if self._channel is not None:
            self._channel.listen(hear)

    async def tell(self, notices: Sequence[Notice]) -> None:
        if self._channel is not None and notices:
            await self._channel.tell(self._database, notices)
