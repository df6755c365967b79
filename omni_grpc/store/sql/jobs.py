"""Jobs and their logs in a database."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.records import Cause, Entry, JobQuery, JobRecord, JobWrite, Rejected, StoredJob
from omni_grpc.store.sql import codec, pages, rows, tables
from omni_grpc.store.sql.database import Database
from omni_grpc.store.sql.dialect import insert
from omni_grpc.store.sql.together import Together
from omni_grpc.store.sql.writing import Batch, delete_labels, requested

DECODED = 8
"""Jobs with their logs that are decoded before others may use the loop: about 1 ms."""

jobs, events, inputs, artifacts, assets = (
    tables.jobs,
    tables.events,
    tables.inputs,
    tables.artifacts,
    tables.assets,
)
logger = logging.getLogger(__name__)


class SqlJobs:
    """It implements `omni_grpc.store.seam.JobRows`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._finding: Together[tuple[str, str], str] = Together(self._find)

    async def write(self, writes: Sequence[JobWrite]) -> Rejected:
        return await self._database.write(Batch(writes)) if writes else Rejected()

    async def read(self, job_ids: Sequence[str]) -> list[StoredJob]:
        def work(connection: sa.Connection) -> _Found:
            found = _Found()
            for some in rows.chunks(job_ids):
                found.add(connection, sa.select(*rows.RECORD).where(jobs.c.id.in_(some)))
            return found

        stored = {one.record.id: one for one in await (await self._database.read(work)).decoded()}
        return [stored[job_id] for job_id in job_ids if job_id in stored]

    async def entries(self, job_id: str, after_seq: int = 0) -> list[Entry]:
        select = sa.select(events).where(events.c.job_id == job_id, events.c.seq > after_seq).order_by(events.c.seq)
        return list(rows.entries(await self._database.read(lambda connection: connection.execute(select).all())))

    async def find(self, tenant: str, request_id: str) -> str | None:
        return await self._finding.of((tenant, request_id))

    async def _find(self, asked: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        return await self._database.read(lambda connection: requested(connection, asked))

    async def page(self, query: JobQuery) -> list[StoredJob]:
        def work(connection: sa.Connection) -> _Found:
            found = _Found()
            found.add(connection, pages.page(query))
            return found

        return await (await self._database.read(work)).decoded()

    async def count(self, query: JobQuery) -> int:
        return await self._database.read(lambda connection: connection.scalar(pages.count(query)) or 0)

    async def unfinished(self, server: str) -> list[str]:
        select = _unfinished(jobs.c.id).where(jobs.c.server == server).order_by(jobs.c.create_time, jobs.c.id)
        return await self._database.read(lambda connection: list(connection.scalars(select)))

    async def queued_before(self, job: JobRecord) -> int:
        earlier = (jobs.c.priority > job.priority) | (
            (jobs.c.priority == job.priority) & (jobs.c.create_time < job.create_time)
        )
        select = sa.select(sa.func.count()).where(
            jobs.c.model == job.model, tables.QUEUED, jobs.c.server != job.server, earlier
        )
        return await self._database.read(lambda connection: connection.scalar(select) or 0)

    async def request_cancel(self, job_id: str, reason: str) -> JobRecord | None:
        def work(connection: sa.Connection) -> sa.RowMapping | None:
            asked = sa.update(jobs).where(jobs.c.id == job_id, jobs.c.cancel_reason.is_(None), tables.UNFINISHED)
            connection.execute(asked.values(cancel_reason=reason))
            return connection.execute(sa.select(*rows.RECORD).where(jobs.c.id == job_id)).mappings().one_or_none()

        row = await self._database.write(work)
        return None if row is None else _record(row)

    async def cancelled(self, server: str) -> list[tuple[str, str]]:
        select = _unfinished(jobs.c.id, jobs.c.cancel_reason).where(
            jobs.c.server == server, jobs.c.cancel_reason.is_not(None)
        )
        found = await self._database.read(lambda connection: connection.execute(select).all())
        return [(row.id, row.cancel_reason) for row in found]

    async def delete(self, job_ids: Collection[str], cause: Cause) -> list[str]:
        def work(connection: sa.Connection) -> list[str]:
            found: list[str] = []
            for some in rows.chunks(sorted(set(job_ids))):
                found += _delete(connection, some, cause)
            still = owned(connection, found)
            return [blob for blob in found if blob not in still]

        return await self._database.write(work) if job_ids else []

    async def expired(self, now: float, limit: int) -> list[str]:
        select = sa.select(jobs.c.id).where(jobs.c.expire_time <= now, tables.EXPIRES)
        select = select.order_by(jobs.c.expire_time, jobs.c.id).limit(limit)
        return await self._database.read(lambda connection: list(connection.scalars(select)))

    async def oldest(self, tenant: str, limit: int) -> list[str]:
        has = sa.exists().where(artifacts.c.job_id == jobs.c.id)
        select = sa.select(jobs.c.id).where(jobs.c.tenant == tenant, tables.ENDED, has)
        select = select.order_by(jobs.c.end_time, jobs.c.id).limit(limit)
        return await self._database.read(lambda connection: list(connection.scalars(select)))


def _unfinished(*columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(tables.UNFINISHED)


def owned(connection: sa.Connection, blobs: Sequence[str]) -> set[str]:
    """Those of these blobs that a row names."""
    found: set[str] = set()
    for some in rows.chunks(blobs):
        for column in (artifacts.c.artifact_id, assets.c.id, inputs.c.blob):
            found |= set(connection.scalars(sa.select(column).where(column.in_(some))))
    return found


def remember(connection: sa.Connection, names: Sequence[tuple[str, str]], cause: Cause) -> None:
    """Names of what is gone, with their tenants."""
    now = time.time()
    insert(
        connection,
        tables.gone,
        [{"name": name, "cause": cause.value, "tenant": tenant, "time": now} for name, tenant in names],
    )


def _delete(connection: sa.Connection, job_ids: Sequence[str], cause: Cause) -> list[str]:
    """The blobs that these jobs had."""
    columns = (jobs.c.id, jobs.c.tenant, jobs.c.create_time, jobs.c.labels)
    chosen = sa.select(*columns).where(jobs.c.id.in_(job_ids)).order_by(jobs.c.id).with_for_update()
    found = connection.execute(chosen).all()
    ids = [row.id for row in found]
    tenants = {row.id: row.tenant for row in found}
    outputs = connection.execute(
        sa.select(artifacts.c.artifact_id, artifacts.c.job_id).where(artifacts.c.job_id.in_(ids))
    ).all()
    kept = connection.scalars(sa.select(inputs.c.blob).where(inputs.c.job_id.in_(ids))).all()
    delete_labels(
        connection,
        [
            {"tenant": row.tenant, "name": name, "value": value, "create_time": row.create_time, "job_id": row.id}
            for row in found
            for name, value in codec.decode_labels(row.labels).items()
        ],
    )
    for column in (events.c.job_id, inputs.c.job_id, artifacts.c.job_id, jobs.c.id):
        connection.execute(sa.delete(column.table).where(column.in_(ids)))
    gone = [*tenants.items(), *((row.artifact_id, tenants[row.job_id]) for row in outputs)]
    remember(connection, gone, cause)
    return list(dict.fromkeys([*(row.artifact_id for row in outputs), *kept]))


def _record(row: sa.RowMapping) -> JobRecord | None:
    """None where it cannot be read, which the log says."""
    try:
        return rows.job_record(row)
    except (codec.Unreadable, ValueError) as error:
        logger.error("job %s is left out: %s", row["id"], error)
        return None


class _Found:
    """Rows of jobs and of their logs, of one state of the database."""

    def __init__(self) -> None:
        self._jobs: list[sa.RowMapping] = []
        self._events: dict[str, list[sa.Row[Any]]] = collections.defaultdict(list)

    def add(self, connection: sa.Connection, select: sa.Select[Any]) -> None:
        found = connection.execute(select).mappings().all()
        self._jobs += found
        for some in rows.chunks([row["id"] for row in found]):
            wanted = sa.select(events).where(events.c.job_id.in_(some)).order_by(events.c.job_id, events.c.seq)
            for row in connection.execute(wanted):
                self._events[row.job_id].append(row)

    async def decoded(self) -> list[StoredJob]:
        """Lets others use the loop in between. What cannot be read is left out, and the log says so."""
        stored = []
        for number, row in enumerate(self._jobs):
            if number and number % DECODED == 0:
                await asyncio.sleep(0)
            if (record := _record(row)) is not None:
                stored.append(StoredJob(record, tuple(rows.entries(self._events[record.id]))))
        return stored
