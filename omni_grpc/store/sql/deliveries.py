"""Webhooks that are owed, in a database."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.records import Delivery, JobState, Outcome
from omni_grpc.store.sql import tables
from omni_grpc.store.sql.codec import decode, encode
from omni_grpc.store.sql.database import Database
from omni_grpc.types.trace import TraceContext

deliveries = tables.deliveries
FIELDS = tuple(deliveries.c[field.name] for field in dataclasses.fields(Delivery))
NOBODY: Mapping[str, Any] = {"claimed_by": "", "claimed_until": 0.0}


def delivery_row(delivery: Delivery) -> dict[str, Any]:
    """As it is when nobody has claimed it yet."""
    trace = None if delivery.trace is None else encode(delivery.trace)
    plain = {"state": delivery.state.value, "outcome": delivery.outcome.value, "trace": trace}
    return {**dataclasses.asdict(delivery), **plain, **NOBODY}


def _delivery(row: sa.Row[Any]) -> Delivery:
    known = dict(row._mapping)
    trace = None if known["trace"] is None else decode(TraceContext, known["trace"])
    read = {"state": JobState(known["state"]), "outcome": Outcome(known["outcome"]), "trace": trace}
    return Delivery(**known | read)


class SqlDeliveries:
    """It implements `omni_grpc.store.seam.Deliveries`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def hosts(self, now: float) -> list[str]:
        first = sa.func.min(deliveries.c.due)
        select = sa.select(deliveries.c.host).where(*_free(now)).group_by(deliveries.c.host)
        select = select.order_by(first, deliveries.c.host)
        return await self._database.read(lambda connection: list(connection.scalars(select)))

    async def claim(self, host: str, now: float, *, owner: str, until: float, limit: int) -> list[Delivery]:
        select = sa.select(*FIELDS).where(deliveries.c.host == host, *_free(now))
        select = select.order_by(deliveries.c.due, deliveries.c.id).limit(limit)
        # what another server is about to claim is passed over; once it has, that is no longer free
        select = select.with_for_update(skip_locked=True)

        def work(connection: sa.Connection) -> list[Delivery]:
            found = [_delivery(row) for row in connection.execute(select)]
            if found:
                claimed = sa.update(deliveries).where(deliveries.c.id.in_([one.id for one in found]))
                connection.execute(claimed.values(claimed_by=owner, claimed_until=until))
            return found

        return await self._database.write(work)

    async def release(self, owner: str = "") -> None:
        released = sa.update(deliveries).where(tables.CLAIMED)
        if owner:
            released = released.where(deliveries.c.claimed_by == owner)
        await self._write(released.values(**NOBODY))

    async def done(self, delivery_id: str, now: float, attempts: int) -> None:
        await self._write(_pending(delivery_id).values(_end(Outcome.DELIVERED, now, attempts, "")))

    async def retry(self, delivery_id: str, due: float, attempts: int, error: str, *, owner: str) -> None:
        changed = _pending(delivery_id).where(deliveries.c.claimed_by == owner)
        await self._write(changed.values(due=due, attempts=attempts, last_error=error, **NOBODY))

    async def give_up(self, delivery_id: str, now: float, attempts: int, error: str, *, owner: str) -> None:
        changed = _pending(delivery_id).where(deliveries.c.claimed_by == owner)
        await self._write(changed.values(_end(Outcome.GIVEN_UP, now, attempts, error)))

    async def of(self, job_id: str) -> list[Delivery]:
        select = sa.select(*FIELDS).where(deliveries.c.job_id == job_id)
        select = select.order_by(deliveries.c.create_time, deliveries.c.id)
        found = await self._database.read(lambda connection: connection.execute(select).all())
        return [_delivery(row) for row in found]

    async def forget(self, before: float) -> None:
        await self._write(sa.delete(deliveries).where(tables.ENDED, deliveries.c.end_time < before))

    async def _write(self, statement: sa.Update | sa.Delete) -> None:
        await self._database.write(lambda connection: connection.execute(statement))


def _free(now: float) -> tuple[Any, ...]:
    """What is due and claimed by nobody."""
    return tables.PENDING, deliveries.c.due <= now, deliveries.c.claimed_until <= now


def _pending(delivery_id: str) -> sa.Update:
    return sa.update(deliveries).where(deliveries.c.id == delivery_id, tables.PENDING)


def _end(outcome: Outcome, now: float, attempts: int, error: str) -> dict[str, Any]:
    ended = {"outcome": outcome.value, "end_time": now, "attempts": attempts, "last_error": error, "body": b""}
    return {**ended, **NOBODY}
