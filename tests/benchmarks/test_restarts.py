"""Real servers are killed with what they keep, and taken over; accepting is measured a little. No assertion is about
speed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.service import accept, restarts, takeover
from benchmarks.service.lives import MEMORY, POSTGRESQL, SQLITE
from benchmarks.service.report import Result, load, write
from tests.store.postgres import Postgres, new_database
from tests.store.postgres import postgres as postgres

pytestmark = pytest.mark.service


def check(result: Result) -> Result:
    assert list(result.problems) == []
    assert {len(row) for row in result.rows} == {len(result.columns)}
    json.dumps(result.figures)
    return result


def killed(store: str, kills: int, state_url: str = "", **changes: object) -> dict[str, int]:
    numbers = restarts.Numbers(kills=kills, store=store, state_url=state_url, longest=0.8, **changes)  # type: ignore[arg-type]
    figures = check(restarts.measure(numbers)).figures
    assert figures["kills"] == kills
    counts: dict[str, int] = figures["counts"]
    assert counts["acknowledged"] > 0
    return counts


def test_nothing_is_lost_with_sqlite() -> None:
    counts = killed(SQLITE, 10)
    assert counts.get("lost", 0) == 0
    assert counts["looks"] > counts["acknowledged"]
    assert counts["downloads"] > 0


def test_nothing_is_lost_with_postgresql(postgres: Postgres) -> None:
    counts = killed(POSTGRESQL, 10, new_database(postgres))
    assert counts.get("lost", 0) == 0
    assert counts["looks"] > counts["acknowledged"]


def test_all_is_lost_with_memory_and_the_server_says_so() -> None:
    counts = killed(MEMORY, 2, starting=0.0)
    assert counts["lost"] == counts["looks"] > 0


def test_a_killed_server_is_taken_over(postgres: Postgres) -> None:
    numbers = takeover.Numbers(leases=(1.0,), rounds=1, jobs=8, others=2, steps=10, state_url=new_database(postgres))
    (found,) = check(takeover.measure(numbers)).figures["leases"]["1"]
    assert found["running_at_kill"] + found["waiting_at_kill"] == len(found["taken_seconds"])


def test_accepting_is_counted(tmp_path: Path) -> None:
    numbers = accept.Numbers(
        stores=(MEMORY, SQLITE), clients=(4,), seconds=0.5, settle=0.1, jobs=2, steps=20, pause=0.001
    )
    result = check(accept.measure(numbers))
    for store, found in result.figures["stores"].items():
        assert found["clients"][4]["per_second"] > 0, store
        assert found["clients"][4]["p50_ms"] <= found["clients"][4]["p99_ms"]
    with load() as meanwhile:
        pass
    said = json.loads(write(tmp_path, "accept", result, meanwhile).read_text())["script"]
    assert said == "python -m benchmarks.service accept --store memory,sqlite --clients 4"
