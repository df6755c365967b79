"""PostgreSQL: a database that goes away, hangs or refuses, and what servers tell each other through it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import sqlalchemy as sa

from omni_grpc.store.records import Entry, JobQuery
from omni_grpc.store.seam import Notice, StoreError
from omni_grpc.store.sql import SqlStore, notices
from omni_grpc.types import events
from omni_grpc.types.errors import ConfigError
from tests.store import postgres as postgres_fixture
from tests.store.postgres import Postgres, running
from tests.store.samples import full, new, record


@contextlib.asynccontextmanager
async def opened(url: str, **options) -> AsyncIterator[SqlStore]:
    store = SqlStore.postgresql(url, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(scope="module")
def own(postgres: Postgres) -> Iterator[Postgres]:
    """A server for tests that stop it. Where there is none, `postgres` has said so."""
    with running() as server:
        yield server


@pytest.fixture
async def url(postgres: Postgres) -> str:
    return await postgres.create()


async def test_a_database_that_crashes_loses_nothing_and_is_used_again(own: Postgres) -> None:
    async with opened(await own.create(), timeout=5.0) as store:
        heard: list[Notice] = []
        store.servers.listen(heard.append)
        await store.jobs.write(new(record(1)))
        await asyncio.to_thread(own.stop, "immediate")
        for attempt in (store.jobs.write(new(record(2))), store.jobs.page(JobQuery())):
            began = time.monotonic()
            with pytest.raises(StoreError) as caught:
                await attempt
            assert caught.value.retryable
            assert time.monotonic() - began < 5
        await asyncio.to_thread(own.start)
        assert not (await store.jobs.write(new(record(2)))).taken
        assert await store.jobs.count(JobQuery()) == 2
        async with opened(store_url(own, store)) as other:
            async with asyncio.timeout(10):
                while not heard:
                    await other.servers.tell([Notice(job_id="job-0001", seq=1)])
                    await asyncio.sleep(0.05)


def store_url(server: Postgres, store: SqlStore) -> str:
    return server.url(store.name.rpartition("/")[2])


async def test_a_database_that_hangs_holds_no_caller(own: Postgres) -> None:
    async with opened(await own.create(), timeout=0.5) as store:
        await store.jobs.write(new(record(1)))
        processes = await asyncio.to_thread(own.processes)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreError) as caught:
                await store.jobs.write(new(record(2)))
            assert caught.value.retryable
            assert time.monotonic() - began < 2
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(StoreError):
                    await store.jobs.write(new(record(2)))
                    break
        assert await store.jobs.count(JobQuery()) == 2


async def test_a_row_that_another_holds(url: str) -> None:
    async with opened(url, timeout=0.5) as store, opened(url) as other:
        await store.jobs.write(new(record(1)))
        holding = asyncio.Event()

        async def hold() -> None:
            async with other._database._writers.begin() as connection:
                await connection.execute(sa.text("SELECT 1 FROM jobs FOR UPDATE"))
                holding.set()
                await asyncio.sleep(1.0)

        task = asyncio.create_task(hold())
        await holding.wait()
        with pytest.raises(StoreError) as caught:
            await store.jobs.request_cancel("job-0001", "x")
        assert caught.value.retryable
        await task
        assert await store.jobs.request_cancel("job-0001", "y") is not None


async def test_a_database_that_takes_no_writes(url: str) -> None:
    async with opened(url) as store:
        await store.jobs.write(new(record(1)))
    name = url.partition("@/")[2].partition("?")[0]
    async with opened(url) as store:
        alter = sa.text(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await store._database.write(lambda connection: connection.execute(alter))
    async with opened(url) as store:
        with pytest.raises(StoreError, match="takes no writes") as caught:
            await store.jobs.write(new(record(2)))
        assert caught.value.retryable
        assert await store.jobs.count(JobQuery()) == 1


SECRET = "s3cret%40word"  # pragma: allowlist secret


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://u:{secret}@localhost/jobs", "'mysql' is no database that can be used"),
        ("jobs.db", "'it' is no database"),
        ("postgresql://u:{secret}@127.0.0.1:{port}/jobs", "does not answer"),
        ("postgres://u:{secret}@127.0.0.1:port/jobs", "percent-encode"),
        ("postgresql://u:{secret}@127.0.0.1:{port}/jobs?sslmode=perhaps", "is not an address"),
        ("postgresql://u:s3cret/w@127.0.0.1:{port}/jobs", "percent-encode"),
        ("postgresql://u:5432/s3cret@127.0.0.1:{port}/jobs", "percent-encode"),
        ("postgresql://u:5432?s3cret@127.0.0.1:{port}/jobs", "percent-encode"),
        ("postgresql://u:5432#s3cret@127.0.0.1:{port}/jobs", "percent-encode"),
        ("postgresql+asyncpg://u:{secret}@127.0.0.1:{port}/jobs?sslmode=require", "does not answer"),
    ],
)
async def test_an_address_that_cannot_be_used(url: str, says: str) -> None:
    port = unused_port()
    with pytest.raises(ConfigError, match=says) as caught:
        await SqlStore.postgresql(url.format(secret=SECRET, port=port)).open()
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_what_the_database_refuses_is_said_without_the_password(postgres: Postgres) -> None:
    folder = postgres.url("x").partition("host=")[2]
    with pytest.raises(ConfigError, match=r"no database of this name.*--state-url") as caught:
        await SqlStore.postgresql(f"postgresql://omni:{SECRET}@/nowhere?host={folder}").open()
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="does not accept the user"):
        await SqlStore.postgresql(f"postgresql://nobody:{SECRET}@/postgres?host={folder}").open()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (f"postgres://user:{SECRET}@db.example.org:6000/jobs?sslmode=require", "db.example.org:6000/jobs"),
        (f"postgresql://user:{SECRET}@[::1]:6000/jobs", "[::1]:6000/jobs"),
        (f"postgresql://user:{SECRET}@one:6000,two:6001/jobs", "one:6000,two:6001/jobs"),
        (f"postgresql://user:s3cret@word@one/jobs?application_name={SECRET}", "one/jobs"),
        (f"postgresql://?host=somewhere&password={SECRET}", ""),
        ("postgresql:///jobs", "/jobs"),
    ],
)
def test_its_name_has_no_password(url: str, name: str) -> None:
    store = SqlStore.postgresql(url)
    assert store.name == f"postgresql://{name}"
    assert (store.durable, store.shared) == (True, True)


async def test_a_database_that_forgets_is_warned_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    async with opened(url) as store:
        assert "can be lost" not in caplog.text
        alter = sa.text(f"ALTER DATABASE {name} SET synchronous_commit = off")
        await store._database.write(lambda connection: connection.execute(alter))
    async with opened(url):
        assert "synchronous_commit=off: jobs that were accepted can be lost" in caplog.text


async def test_servers_hear_each_other_and_not_themselves(url: str) -> None:
    async with opened(url) as one, opened(url) as two:
        heard: tuple[list[Notice], list[Notice]] = [], []
        for store, into in zip((one, two), heard, strict=True):
            store.servers.listen(into.append)
        progress = Entry(9, 4.5, full(events.StepProgress))
        long = Entry(9, 4.5, events.Cancelled(reason="x" * 9000, completed_steps=1, stats=full(events.Stats)))
        told = [
            Notice(job_id="job-1", seq=8, progress=progress, cancel=True),
            Notice(job_id="job-2", gone=True, progress=long),
        ]
        async with asyncio.timeout(10):
            while not heard[1]:
                await one.servers.tell([Notice(job_id="ready")])
                await asyncio.sleep(0.02)
            await one.servers.tell(told)
            await two.servers.tell([Notice(job_id="last")])
            while heard[1][-1:] != [Notice(job_id="job-2", gone=True)] or not heard[0]:
                await two.servers.alive(0.0)
        assert heard[1][-2:] == [told[0], Notice(job_id="job-2", gone=True)]
        assert heard[0] == [Notice(job_id="last")]
        await one.servers.tell([])


async def test_listening_goes_on_after_the_connection_is_cut(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "CHECK", 0.2)
    async with opened(url) as one, opened(url) as two:
        heard: list[Notice] = []
        two.servers.listen(heard.append)

        async def until_heard() -> None:
            heard.clear()
            async with asyncio.timeout(10):
                while not heard:
                    await one.servers.tell([Notice(job_id="x")])
                    await asyncio.sleep(0.02)

        await until_heard()
        cut = sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
        await one._database.write(lambda connection: connection.execute(cut))
        await until_heard()


async def test_what_is_no_notice_of_ours_is_passed_over(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(url) as one, opened(url) as two:
        heard: list[Notice] = []
        two.servers.listen(heard.append)
        noise = sa.text("SELECT pg_notify('omni_grpc public', 'hello')")
        async with asyncio.timeout(10):
            while "cannot be read" not in caplog.text:
                await one._database.write(lambda connection: connection.execute(noise))
                await asyncio.sleep(0.02)
            while not heard:
                await one.servers.tell([Notice(job_id="x")])
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("required", ["", "1"])
def test_without_postgresql_tests_are_skipped_unless_it_must_be_there(
    required: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_fixture, "programs", lambda: None)
    monkeypatch.setenv(postgres_fixture.REQUIRED, required)
    expected = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(expected, match="apt-get install postgresql"):
        next(postgres_fixture.started())
