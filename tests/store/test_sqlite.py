"""A file of SQLite: who may have it, what is wrong with it in words, and what happens where the disk is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from omni_grpc.store.records import JobQuery, JobWrite
from omni_grpc.store.seam import StoreError
from omni_grpc.store.sql import SqlStore
from omni_grpc.types.errors import ConfigError
from tests.full_disk import mounted, small_files
from tests.house.source import ROOT
from tests.store.samples import new, queued, record


@contextlib.asynccontextmanager
async def opened(path: Path, **options) -> AsyncIterator[SqlStore]:
    store = SqlStore.sqlite(path, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def test_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    path = tmp_path / "state" / "jobs.db"
    before = os.umask(0)
    try:
        async with opened(path) as store:
            await store.jobs.write(new(record(1)))
            modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db.lock"), 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.touch(0o644)
    async with opened(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_what_was_written_is_there_after_a_restart_and_is_taken_over_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db") as store:
        await store.servers.beat("one", 1.0, 4e9)
        await store.jobs.write(new(record(1), record(2)))
    async with opened(tmp_path / "jobs.db") as store:
        await store.servers.beat("two", 1.0, 4e9)
        assert await store.servers.take_over("two", 1.0) == ["job-0001", "job-0002"]


async def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db") as store:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2)):
            ask = f"PRAGMA {pragma}"
            found = await store._database.write(lambda connection, ask=ask: connection.exec_driver_sql(ask).scalar())
            assert found == value


async def test_a_second_server_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db") as first:
        with pytest.raises(ConfigError, match=r"jobs\.db is in use by another server.*--state-dir.*--state-url"):
            await SqlStore.sqlite(tmp_path / "jobs.db").open()
        # the one that was refused has taken no lock of the first one with it
        program = "import sys; from omni_grpc.store.sql import SqlStore; import asyncio, pathlib\n"
        program += f"asyncio.run(SqlStore.sqlite(pathlib.Path({str(tmp_path / 'jobs.db')!r})).open())"
        command = [sys.executable, "-c", program]
        done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "is in use by another server" in done.stderr
        await first.jobs.write(new(record(1)))
    async with opened(tmp_path / "jobs.db") as second:
        assert await second.jobs.count(JobQuery()) == 1


async def fill(store: SqlStore) -> None:
    for number in range(1, 2000):
        await store.jobs.write(new(record(number)))


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"this is no database" * 100, "is no SQLite database"), (None, "is a folder")],
    ids=["garbage", "a folder"],
)
async def test_a_file_that_is_no_database(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        await SqlStore.sqlite(path).open()
    assert str(path) in str(caught.value)
    if content is not None:
        assert path.read_bytes() == content


async def test_a_damaged_database(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with opened(path) as store:
        await store.jobs.write(new(*(record(number) for number in range(50))))
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xaa" * 6000 + whole[6100:])
    with pytest.raises(ConfigError, match=r"damaged: restore it"):
        await SqlStore.sqlite(path).open()
    path.write_bytes(whole[:-30000] + b"\xaa" * 30000)
    store = SqlStore.sqlite(path)

    async def use() -> None:
        await store.open()
        await store.jobs.page(JobQuery())
        await store.files.artifacts()
        await store.jobs.write(new(*(record(number) for number in range(100, 150))))

    with pytest.raises((StoreError, ConfigError), match="damaged") as caught:
        await use()
    assert not getattr(caught.value, "retryable", False)
    await store.close()


async def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with mounted(folder, read_only=True) as disk:
        if disk is None:
            if os.getuid() == 0:
                pytest.skip("no file system can be mounted here")
            folder.chmod(0o500)
        with pytest.raises(ConfigError, match=r"(read-only|permission is denied).*--state-dir"):
            await SqlStore.sqlite(folder / "jobs.db").open()


async def test_a_file_that_becomes_read_only(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db") as store:
        query_only = sa.text("PRAGMA query_only = 1")
        await store._database.write(lambda connection: connection.execute(query_only))
        with pytest.raises(StoreError, match="may not be written") as caught:
            await store.jobs.write(new(record(1)))
        assert not caught.value.retryable
        assert await store.jobs.count(JobQuery()) == 0


async def test_a_full_disk_refuses_new_jobs_and_takes_them_again_when_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, kilobytes=1200) as disk:
        if disk is None:
            pytest.skip("no file system can be mounted here")
        ballast = folder / "ballast"
        async with opened(folder / "jobs.db") as store:
            await store.jobs.write(new(record(0)))
            ballast.write_bytes(b"x" * 200_000)
            with pytest.raises(StoreError, match="disk of the job store is full") as caught:
                await fill(store)
            (newest,) = await store.jobs.page(JobQuery(limit=1))
            written = int(newest.record.id[-4:]) + 1
            assert written > 1
            assert caught.value.retryable
            assert await store.jobs.count(JobQuery()) == written
            ballast.unlink()
            await store.jobs.write(new(record(5000)))
            assert await store.jobs.count(JobQuery()) == written + 1


async def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """As with `ulimit -f`: SQLite says that as an error of the disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        async with opened(tmp_path / "jobs.db") as store:
            await store.jobs.write(new(record(0)))
            with small_files(100_000), pytest.raises(StoreError, match="make room") as caught:
                await fill(store)
            assert caught.value.retryable
            await store.jobs.write(new(record(5000)))
            assert await store.jobs.read(["job-5000"])
    finally:
        signal.signal(signal.SIGXFSZ, before)


async def test_another_program_that_holds_the_file(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db", timeout=0.4) as store:
        holder = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreError, match="another program holds the file") as caught:
            await store.jobs.write(new(record(1)))
        assert time.monotonic() - began < 2
        assert caught.value.retryable
        assert await store.jobs.count(JobQuery()) == 0
        holder.execute("ROLLBACK")
        holder.close()
        await store.jobs.write(new(record(1)))


async def test_a_disk_that_hangs_holds_no_caller_and_is_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db", timeout=0.3) as store:

        def hang(connection: sa.Connection) -> None:
            connection.connection.dbapi_connection.create_function("hang", 1, lambda seconds: time.sleep(seconds) or 1)
            connection.exec_driver_sql("SELECT hang(2.0)")

        began = time.monotonic()
        with pytest.raises(StoreError, match=r"has not answered for 0\.3 s"):
            await store._database.write(hang)
        with pytest.raises(StoreError):
            await store.jobs.write(new(record(1)))
        assert time.monotonic() - began < 1.8
        await asyncio.sleep(2.2)
        await store.jobs.write(new(record(2)))
        assert await store.jobs.read(["job-0002"])


async def test_a_caller_who_is_cancelled_leaves_the_store_whole(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db") as store:
        for number in range(40):
            task = asyncio.create_task(store.jobs.write(new(record(number))))
            await asyncio.sleep(0.0005 * (number % 8))
            task.cancel()
        await store.jobs.write(new(record(99)))
        found = await store.jobs.page(JobQuery(limit=99))
        assert "job-0099" in [one.record.id for one in found]
        assert all(one.entries == (queued(),) for one in found)


async def test_64_new_jobs_do_not_hold_the_loop(tmp_path: Path) -> None:
    """The bound is generous, since the machine of the tests does other things too; the benchmark has the figure."""
    async with opened(tmp_path / "jobs.db") as store:
        await store.jobs.write(new(record(0)))
        longest = 0.0
        stop = asyncio.Event()

        async def watch() -> None:
            nonlocal longest
            while not stop.is_set():
                began = time.perf_counter()
                await asyncio.sleep(0)
                longest = max(longest, time.perf_counter() - began)

        watching = asyncio.create_task(watch())
        least = float("inf")
        for group in range(1, 6):
            longest = 0.0
            writes = [
                JobWrite(record=record(group * 100 + one, labels={"a": "b"}), entries=(queued(),), created=True)
                for one in range(64)
            ]
            await store.jobs.write(writes)
            least = min(least, longest)
        stop.set()
        await watching
        assert least < 0.02
