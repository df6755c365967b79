"""The table of webhooks in a database: what its statements read, and how a database of before gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from omni_grpc.store.records import JobState, Outcome
from omni_grpc.store.sql import SqlStore, rows, tables, upgrade
from tests.store.postgres import Postgres
from tests.webhooks.owed import delivery, record, write


async def test_every_statement_goes_by_an_index(tmp_path: Path) -> None:
    store = SqlStore.sqlite(tmp_path / "jobs.db")
    await store.open()
    said: list[tuple[str, object]] = []

    def hear(connection, cursor, statement, parameters, context, many) -> None:
        if "deliveries" in statement and not statement.startswith("INSERT"):
            said.append((statement, parameters))

    for engine in (store._database._readers, store._database._writers):
        sa.event.listen(engine.sync_engine, "before_cursor_execute", hear)
    await store.jobs.write([write(delivery())])
    owed = store.deliveries
    await owed.hosts(10.0)
    await owed.claim("hooks.test", 10.0, owner="a", until=20.0, limit=2)
    await owed.release("a")
    await owed.release()
    await owed.retry("job_1-succeeded", 20.0, 1, "x", owner="a")
    await owed.give_up("job_1-succeeded", 20.0, 1, "x", owner="a")
    await owed.done("job_1-succeeded", 20.0, 1)
    await owed.of("job_1")
    await owed.forget(5.0)
    assert len(said) == 10
    for statement, parameters in tuple(said):
        explained = f"EXPLAIN QUERY PLAN {statement}"
        steps = await store._database.read(
            lambda connection, of=explained, with_=parameters: [
                row.detail for row in connection.exec_driver_sql(of, with_)
            ]
        )
        assert all("USING" in step for step in steps if step.startswith(("SCAN", "SEARCH"))), (statement, steps)
        assert any(step.startswith(("SCAN", "SEARCH")) for step in steps), (statement, steps)
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_database_of_version_1_keeps_its_jobs(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "sqlite":
        store = SqlStore.sqlite(tmp_path / "jobs.db")
    else:
        postgres: Postgres = request.getfixturevalue("postgres")
        store = SqlStore.postgresql(await postgres.create())
    await store._upgrading.write(lambda connection: upgrade.upgrade(connection, "0001"))
    names = await store._database.read(lambda connection: set(sa.inspect(connection).get_table_names()))
    assert "deliveries" not in names
    # version 2 leaves the table of jobs as it is
    old = rows.job_columns(record(state=JobState.RUNNING))
    await store._database.write(lambda connection: connection.execute(sa.insert(tables.jobs), [old]))
    await store.open()
    assert await store._database.read(upgrade.version) == upgrade.NEWEST
    (found,) = await store.jobs.read(["job_1"])
    assert (found.record.id, found.record.tenant, found.record.spec.request.prompt) == ("job_1", "studio", "a")
    ends = write(delivery(), created=False, state=JobState.SUCCEEDED)
    assert not (await store.jobs.write([ends])).lost
    assert [one.outcome for one in await store.deliveries.of("job_1")] == [Outcome.PENDING]
    await store.close()
