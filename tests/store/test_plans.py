"""Every list and every search goes by an index: no table is read whole, and no page is sorted."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from omni_grpc.store.records import JobQuery, JobState
from omni_grpc.store.sql import SqlStore, pages
from tests.store.samples import record

RUNNING, FAILED = JobState.RUNNING, JobState.FAILED
FILTERS = {
    "none": {},
    "a state": {"states": (RUNNING,)},
    "states": {"states": (RUNNING, FAILED)},
    "a model": {"model": "tiny"},
    "a model and a state": {"model": "tiny", "states": (FAILED,)},
    "a label": {"labels": {"a": "b"}},
    "labels": {"labels": {"a": "b", "c": "d"}},
    "a label and states": {"labels": {"a": "b"}, "states": (RUNNING, FAILED)},
    "a time": {"created_from": 5.0, "created_before": 9.0},
    "a place": {"after": (7.0, "job-0007")},
    "a label, a model, a state, a time and a place": {
        "labels": {"a": "b"},
        "model": "tiny",
        "states": (FAILED,),
        "created_from": 5.0,
        "after": (7.0, "x"),
    },
}


class Recorder:
    """Collects the statements of a store, with their parameters."""

    def __init__(self, store: SqlStore) -> None:
        self.said: list[tuple[str, object]] = []
        for engine in (store._database._readers, store._database._writers):
            sa.event.listen(engine.sync_engine, "before_cursor_execute", self._hear)

    def _hear(self, connection, cursor, statement, parameters, context, many) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            self.said.append((statement, parameters[0] if many else parameters))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    one = SqlStore.sqlite(tmp_path / "jobs.db")
    await one.open()
    yield one
    await one.close()


async def plan(store: SqlStore, statement: str, parameters: object) -> list[str]:
    explained = f"EXPLAIN QUERY PLAN {statement}"
    return await store._database.read(
        lambda connection: [row.detail for row in connection.exec_driver_sql(explained, parameters)]
    )


@pytest.mark.parametrize("tenant", ["a", None])
@pytest.mark.parametrize("chosen", FILTERS)
async def test_a_page_goes_by_an_index_in_its_order(store: SqlStore, chosen: str, tenant: str | None) -> None:
    query = JobQuery(tenant=tenant, **FILTERS[chosen])
    found = pages.page(query).compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    steps = await plan(store, str(found), ())
    assert not [step for step in steps if step.startswith("SCAN jobs") and "USING INDEX jobs_by_time" not in step], (
        steps
    )
    whole = [step for step in steps if step.startswith("SCAN labels")]
    assert not whole, steps
    if tenant is not None or len(FILTERS[chosen]):
        assert any(step.startswith("SEARCH") for step in steps), steps
    sorted_ones = [before for before, step in itertools.pairwise(steps) if "TEMP B-TREE" in step]
    # of several states, the newest of each are merged: a page of each at most
    assert all(step.startswith("SCAN anon_") for step in sorted_ones), steps
    assert bool(sorted_ones) == (chosen == "states"), steps
    first = {"a label": "labels", "labels": "labels"}.get(chosen, "jobs" if "label" not in chosen else "labels")
    assert next(step for step in steps if step.startswith(("SEARCH", "SCAN"))).split()[1] == first, steps


async def test_nothing_else_reads_a_whole_table(store: SqlStore) -> None:
    recorder = Recorder(store)
    jobs, files, servers = store.jobs, store.files, store.servers
    await jobs.read(["a", "b"])
    await jobs.entries("a", 1)
    await jobs.find("a", "r")
    await jobs.unfinished("one")
    await jobs.queued_before(record())
    await jobs.request_cancel("a", "b")
    await jobs.cancelled("one")
    await jobs.delete(["a", "b"], "DELETED")
    await jobs.expired(5.0, 3)
    await jobs.oldest("a", 3)
    for states in ((), (RUNNING,), (RUNNING, FAILED)):
        await jobs.count(JobQuery(tenant="a", states=states, labels={"a": "b"}))
        await jobs.count(JobQuery(tenant="a", states=states))
    await files.artifact("a")
    await files.artifacts(tenant="a")
    await files.artifacts(job_id="a")
    await files.delete_artifact("a", "DELETED")
    await files.asset("a")
    await files.touch_asset("a", 1.0)
    await files.expired_assets(1.0, 3)
    await files.cause("a")
    await files.forget_names(1.0)
    await files.owned(["a", "b"])
    await servers.beat("one", 1.0, 2.0)
    assert len(recorder.said) > 25
    for statement, parameters in recorder.said:
        steps = await plan(store, statement, parameters)
        # an empty IN is a subquery of a constant
        scans = [step for step in steps if step.startswith("SCAN") and "CONSTANT" not in step and "(" not in step]
        assert not scans, (statement, steps)
        assert not [step for step in steps if "TEMP B-TREE FOR ORDER BY" in step], (statement, steps)


@pytest.mark.parametrize("tenant", ["a", None])
@pytest.mark.parametrize("chosen", FILTERS)
async def test_a_page_goes_by_an_index_of_postgresql_too(migrated: str, chosen: str, tenant: str | None) -> None:
    """Empty tables are cheapest to read whole, so that is forbidden: it is done all the same where nothing else can."""
    store = SqlStore.postgresql(migrated)
    query = JobQuery(tenant=tenant, **FILTERS[chosen])
    found = pages.page(query).compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True})

    def work(connection: sa.Connection) -> str:
        for kind in ("seqscan", "sort", "bitmapscan"):
            connection.exec_driver_sql(f"SET LOCAL enable_{kind} = off")
        return "\n".join(connection.exec_driver_sql(f"EXPLAIN {found}").scalars())

    explained = await store._database.read(work)
    assert "Seq Scan" not in explained
    assert "Index" in explained
    if chosen != "states":
        assert "Sort" not in explained, explained
    await store.close()
