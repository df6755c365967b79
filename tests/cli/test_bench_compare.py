"""What changed between two load tests: which changes are told from chance, and what cannot be compared."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.cli.bench.compare import differences
from omni_grpc.cli.bench.serve.measures import Objectives
from omni_grpc.cli.bench.serve.record import Record
from omni_grpc.cli.bench.serve.slo import Slo
from omni_grpc.cli.main import main

OBJECTIVES = Objectives(run=Slo({"e2e": 1.3}), classes={})


def records(seed: int, count: int = 400, slower: float = 1.0, failed: int = 0) -> list[Record]:
    chance, found = random.Random(seed), []
    for number in range(count):
        at, took = number * 0.5, slower * chance.uniform(0.8, 1.2)
        outcome = "failed" if number < failed else "succeeded"
        its = {"sent": at, "first_event": at + 0.01, "first_step": at + 0.1, "ended": at + took, "outcome": outcome}
        found.append(Record(number=number, klass="a", scheduled=at, **its))
    return found


def worse(before: Sequence[Record], after: Sequence[Record], tolerance: float = 0.05) -> set[str]:
    return {it.name for it in differences(before, after, OBJECTIVES, tolerance, seed=0) if it.worse}


@pytest.mark.parametrize("seed", range(5))
def test_the_same_load_again_is_not_worse(seed: int) -> None:
    assert worse(records(seed), records(seed + 100)) == set()


def test_slower_requests_are_worse_in_each_figure_that_says_so() -> None:
    found = worse(records(0), records(1, slower=1.2))
    assert found == {*(f"end to end, {name}" for name in ("mean", "p50", "p95", "p99")), "objectives kept"}
    assert worse(records(1, slower=1.2), records(0)) == set()
    assert worse(records(0), records(1, slower=1.2), tolerance=0.5) == set()


def test_failures_are_worse() -> None:
    assert worse(records(0), records(0, failed=60)) == {"failed", "objectives kept"}


def test_the_interval_holds_the_change_and_is_wider_for_fewer() -> None:
    many, few = (
        next(iter(differences(records(0, count), records(1, count, slower=1.1), OBJECTIVES, 0.05, seed=0)))
        for count in (800, 50)
    )
    for it in (many, few):
        assert it.interval[0] < it.change < it.interval[1]
    assert many.interval[0] < 0.1 < many.interval[1]
    assert many.interval[1] - many.interval[0] < (few.interval[1] - few.interval[0]) / 2


def test_nothing_is_said_of_the_tail_of_few_requests() -> None:
    names = {it.name for it in differences(records(0, 10), records(1, 10), OBJECTIVES, 0.05, seed=0)}
    assert names == {"end to end, mean", "objectives kept", "failed"}


def run_of(its: Sequence[Record], **more: Any) -> dict[str, Any]:
    point = {"label": "2/s", "rate": 2.0, "requests": [record.as_dict() for record in its]}
    return {
        "schema": "omni_grpc/bench-serve/1",
        "server": {"version": "1", "device": "cpu", "features": {}},
        "model": {"name": "demo"},
        "client": {"cores": 2},
        "load": {"slo": {"e2e": 1.3}, "classes": [], "seed": 0},
        "interrupted": False,
        "points": [point],
        **more,
    }


def compare(tmp_path: Path, before: Any, after: Any, *flags: str) -> int:
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, content in zip(files, (before, after), strict=True):
        file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return main(["bench", "compare", *map(str, files), *flags])


def test_the_command_ends_with_1_where_something_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = run_of(records(0)), run_of(records(1, slower=1.2), model={"name": "other"})
    assert compare(tmp_path, before, after) == 1
    out = capsys.readouterr().out
    assert "note: model name: A demo, B other" in out
    assert "worse beyond 5%: 2/s: end to end, mean" in out
    assert compare(tmp_path, before, run_of(records(7)), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["worse"], found["notes"]) == ([], [])
    assert len(found["differences"]["2/s"]) == 9


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("{}", "b.json is no file of `bench serve --json`"),
        ("[", "b.json is no file of `bench serve --json`"),
        ({"schema": "omni_grpc/bench-serve/0"}, "has the format 'omni_grpc/bench-serve/0', and this version reads"),
        (run_of([], points=[]), "the two files have no rate in common"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: Any, said: str
) -> None:
    assert compare(tmp_path, run_of(records(0, 10)), after) == 2
    assert said in capsys.readouterr().err
