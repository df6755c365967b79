"""A process that writes to a store until it is killed. What it needs is loaded before it is forked."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
from pathlib import Path

import sqlalchemy.dialects.postgresql.asyncpg
import sqlalchemy.dialects.sqlite.pysqlite  # noqa: F401

from omni_grpc.store.records import JobState, JobWrite
from omni_grpc.store.sql import SqlStore, codec
from tests.store.samples import queued, record


def made(place: str) -> SqlStore:
    return SqlStore.postgresql(place) if "://" in place else SqlStore.sqlite(Path(place))


def write_until_killed(place: str, life: int, acknowledged: multiprocessing.connection.Connection) -> None:
    asyncio.run(_write(made(place), life, acknowledged))


async def _write(store: SqlStore, life: int, acknowledged: multiprocessing.connection.Connection) -> None:
    """Sends the ids of each batch after its jobs are created, and again after they have ended. The first batches are
    slow, and the parent waits for them.
    """
    await store.open()
    await store.servers.beat(f"life-{life}", 1.0, 4e9)
    for number in range(10_000):
        jobs = [record(life * 100_000 + number * 10 + one, server=f"life-{life}") for one in range(number % 7 + 1)]
        await store.jobs.write([JobWrite(record=job, entries=(queued(1),), created=True) for job in jobs])
        acknowledged.send([("created", job.id) for job in jobs])
        ended = [
            record(int(job.id[4:]), server=job.server, state=JobState.SUCCEEDED, end_time=2.0, reserved_seq=2)
            for job in jobs
        ]
        await store.jobs.write([JobWrite(record=job, entries=(queued(2),)) for job in ended])
        acknowledged.send([("ended", job.id) for job in ended])


codec.prepare()
