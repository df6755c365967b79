"""A database is brought to the version of the program, from each that there was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import setuptools
import sqlalchemy as sa

from omni_grpc.store.records import AdapterRow, AdapterSource, Cause, JobQuery, JobState, Outcome
from omni_grpc.store.sql import SqlStore, codec, tables, upgrade
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.trace import TraceContext
from tests.house.source import ROOT
from tests.store import versions
from tests.store.postgres import Postgres
from tests.store.samples import new, record
from tests.webhooks.owed import delivery

NEXT = f"{int(upgrade.NEWEST) + 1:04}"
LATER = '''
"""A column with a default, as a later version may add."""
import sqlalchemy as sa
revision, down_revision = "{revision}", "{before}"


def upgrade(op):
    op.add_column("jobs", sa.Column("later", sa.Text, nullable=False, server_default="x"))
    {more}
'''


def later(more: str = "") -> str:
    """A migration that is not there yet."""
    return LATER.format(revision=NEXT, before=upgrade.NEWEST, more=more)


@pytest.fixture
def one_more(tmp_path: Path) -> Path:
    """A folder of migrations with one more."""
    folder = tmp_path / "migrations"
    shutil.copytree(upgrade.FOLDER, folder)
    (folder / "versions" / f"v{NEXT}_later.py").write_text(later())
    return folder


def schema(path: Path) -> dict[str, str]:
    """The statement of every table and index, without spaces."""
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {name: "".join(sql.split()) for name, sql in found if name != tables.VERSION_TABLE}


async def test_the_tables_are_what_the_migrations_leave(tmp_path: Path) -> None:
    store = SqlStore.sqlite(tmp_path / "migrated.db")
    await store.open()
    await store.close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'described.db'}")
    tables.METADATA.create_all(engine)
    engine.dispose()
    assert schema(tmp_path / "migrated.db") == schema(tmp_path / "described.db")


async def test_the_tables_are_the_same_in_postgresql(migrated: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    store = SqlStore.postgresql(migrated)
    options = {"version_table": tables.VERSION_TABLE, "compare_type": True}

    def compare(connection: sa.Connection) -> list:
        found = compare_metadata(MigrationContext.configure(connection, opts=options), tables.METADATA)
        sorted_by = sa.text("SELECT collation_name FROM information_schema.columns WHERE column_name = 'id'")
        assert set(connection.scalars(sorted_by)) == {"C"}
        return found

    assert await store._database.write(compare) == []
    await store.close()


def test_the_newest_migration_is_the_one_that_the_program_names() -> None:
    import alembic.script

    scripts = alembic.script.ScriptDirectory(str(upgrade.FOLDER))
    assert scripts.get_heads() == [upgrade.NEWEST]
    assert set(versions.DUMPS) == {script.revision for script in scripts.walk_revisions()}


ADAPTER = AdapterRow(
    model="tiny",
    lora_id="style",
    uid="style#1",
    source=AdapterSource.HUB,
    place="org/style@0123",
    filename="style.safetensors",
    sha256="cd" * 32,
    size_bytes=9,
    format="peft",
    pinned=True,
    create_time=8.5,
    tenant="studio",
    subject="ann",
)


async def check(store: SqlStore, revision: str) -> None:
    """What the rows of each version are today."""
    if revision >= "0004":
        assert await store.adapters.all() == [ADAPTER]
    if revision >= "0002":
        await check_deliveries(store, TRACE if revision >= "0003" else None)
    await check_version1(store)


TRACE = TraceContext(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331", state="a=1", ours=True)


async def check_deliveries(store: SqlStore, trace: TraceContext | None) -> None:
    told, owed = await store.deliveries.of("job-full")
    assert told == delivery(
        "job-full", JobState.QUEUED, create_time=4.0, attempts=1, outcome=Outcome.DELIVERED, end_time=6.5, body=b""
    )
    reason = "it answered with HTTP status 500"
    assert owed == delivery("job-full", JobState.RUNNING, due=12.5, attempts=1, last_error=reason, trace=trace)
    assert await store.deliveries.claim("hooks.test", 12.5, owner="two", until=50.0, limit=1) == [owed]


def holds(now: object, stored: object) -> bool:
    """Whether all of what was stored is there as it was. What a later version has added beside it has its default."""
    match now, stored:
        case dict(), dict():
            return all(name in now and holds(now[name], value) for name, value in stored.items())
        case list(), list():
            return len(now) == len(stored) and all(map(holds, now, stored))
    return now == stored


def test_the_package_has_the_migrations() -> None:
    packages = setuptools.find_packages(ROOT, include=["omni_grpc", "omni_grpc.*"])
    assert "omni_grpc.store.sql.migrations.versions" in packages


async def check_version1(store: SqlStore) -> None:
    """Against the dump itself: what samples make of today's records has fields that it never had."""
    with contextlib.closing(sqlite3.connect(":memory:")) as kept:
        kept.row_factory = sqlite3.Row
        kept.executescript(versions.DUMPS["0001"].read_text(encoding="utf-8"))
        row = kept.execute("SELECT * FROM jobs WHERE id = 'job-full'").fetchone()
        bodies = kept.execute("SELECT kind, body FROM events ORDER BY seq").fetchall()
    (found,) = await store.jobs.read(["job-full"])
    for name in set(row.keys()) - {"ended", "labels", "spec"}:
        assert getattr(found.record, name) == row[name], name
    assert found.record.labels == {"project": "x"}
    assert holds(json.loads(codec.encode_spec(found.record.spec)), json.loads(row["spec"]))
    assert len(bodies) == 12
    for entry, stored in zip(found.entries, bodies, strict=True):
        kind, body = codec.encode_event(entry.event)
        assert kind == stored["kind"]
        assert holds(json.loads(body), json.loads(stored["body"])), kind
    assert await store.jobs.find("studio", "r-2") == "job-0002"
    assert len(await store.jobs.page(JobQuery(tenant="studio", labels={"project": "x"}))) == 1
    assert await store.files.cause("job-0003") == (Cause.EXPIRED, "")
    assert (await store.files.asset_bytes(), await store.files.artifact_bytes()) == ({"studio": 7}, {"studio": 5})
    assert await store.servers.take_over("two", 4e9) == ["job-0002", "job-full"]


def test_a_value_that_changed_or_went_is_seen() -> None:
    assert holds({"a": [{"b": 1, "new": 0}], "new": None}, {"a": [{"b": 1}]})
    for now in ({"a": [{"b": 2}]}, {"a": []}, {}, {"a": [{}]}):
        assert not holds(now, {"a": [{"b": 1}]}), now


@pytest.mark.parametrize("revision", sorted(versions.DUMPS))
async def test_a_file_of_every_version_can_be_used(revision: str, tmp_path: Path) -> None:
    versions.sqlite_of(revision, tmp_path / "jobs.db")
    store = SqlStore.sqlite(tmp_path / "jobs.db")
    await store.open()
    await check(store, revision)
    await store.close()


@pytest.mark.parametrize("revision", sorted(versions.DUMPS))
async def test_a_database_of_every_version_can_be_used(revision: str, postgres: Postgres, tmp_path: Path) -> None:
    url = await postgres.create()
    await versions.postgresql_of(revision, url, tmp_path / "rows.db")
    store = SqlStore.postgresql(url)
    await store.open()
    await check(store, revision)
    await store.close()


async def make(kind: str, postgres: Postgres, tmp_path: Path) -> SqlStore:
    if kind == "sqlite":
        return SqlStore.sqlite(tmp_path / "jobs.db")
    return SqlStore.postgresql(await postgres.create())


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_migration_keeps_the_rows_and_one_that_fails_changes_nothing(
    kind: str, one_more: Path, postgres: Postgres, tmp_path: Path
) -> None:
    store = await make(kind, postgres, tmp_path)
    await store.open()
    await store.jobs.write(new(record(1)))
    file = one_more / "versions" / f"v{NEXT}_later.py"
    whole = file.read_text()
    file.write_text(later("raise RuntimeError('halfway')"))
    with pytest.raises(RuntimeError, match="halfway"):
        await store._upgrading.write(lambda connection: upgrade.upgrade(connection, NEXT, one_more))
    columns = await store._database.read(lambda connection: sa.inspect(connection).get_columns("jobs"))
    assert "later" not in {column["name"] for column in columns}
    assert await store._database.read(upgrade.version) == upgrade.NEWEST
    file.write_text(whole)
    await store._upgrading.write(lambda connection: upgrade.upgrade(connection, NEXT, one_more))
    assert await store._database.read(lambda connection: connection.scalar(sa.text("SELECT later FROM jobs"))) == "x"
    assert await store.jobs.count(JobQuery()) == 1
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_newer_version_is_refused(kind: str, postgres: Postgres, tmp_path: Path) -> None:
    store = await make(kind, postgres, tmp_path)
    await store.open()
    newer = sa.text(f"UPDATE {tables.VERSION_TABLE} SET version_num = '0999'")
    await store._database.write(lambda connection: connection.execute(newer))
    with pytest.raises(ConfigError, match=rf"newer version.*0999.*knows {upgrade.NEWEST}.*--state-url") as caught:
        await store._bring_up()
    assert "\n" not in str(caught.value)
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_tables_of_others_are_left_alone(kind: str, postgres: Postgres, tmp_path: Path) -> None:
    store = await make(kind, postgres, tmp_path)
    await store._upgrading.write(lambda connection: connection.execute(sa.text("CREATE TABLE jobs (pay int)")))
    with pytest.raises(ConfigError, match=r"not of omni_grpc \(jobs\)"):
        await store.open()


async def test_servers_that_start_at_once_migrate_once(postgres: Postgres) -> None:
    url = await postgres.create()
    stores = [SqlStore.postgresql(url) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].jobs.write(new(record(1)))
    assert [await store.jobs.count(JobQuery()) for store in stores] == [1] * 4
    await asyncio.gather(*(store.close() for store in stores))
