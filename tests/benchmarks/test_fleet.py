"""The benchmarks of replicas and of several models run, with numbers too small to measure anything. No assertion is
about speed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.service import delay, models, replicas
from benchmarks.service.replicated import Kind
from benchmarks.service.report import Result

pytestmark = pytest.mark.service


def check(result: Result) -> Result:
    """No promise was broken, and there is a table."""
    assert list(result.problems) == []
    assert {len(row) for row in result.rows} == {len(result.columns)}
    json.dumps(result.figures)
    return result


def test_no_job_is_lost_with_a_replica_or_notices_a_rolling_restart(tiny_qwen_image: Path) -> None:
    small = Kind(step=0.01, steps=(2, 6))
    numbers = replicas.Numbers(
        rounds=1,
        seconds=0.4,
        lead=0.2,
        places=2,
        quick=small,
        real=Kind(steps=(1, 2)),
        kills=3,
        longest=0.2,
        renewals=1,
    )
    figures = check(replicas.measure(tiny_qwen_image, numbers)).figures
    assert figures["jobs_per_second"].keys() == {"quick", "real"}
    kills = figures["kills"]
    assert (len(kills["back_seconds"]), kills["lost"]) == (3, 0)
    assert kills["ends"].keys() <= {"SUCCEEDED", "FAILED WORKER_DIED"}
    assert kills["held_by_the_other"].keys() <= {"SUCCEEDED"}
    renewals = figures["renewals"]
    assert (len(renewals["seconds"]), renewals["refused"], [*renewals["ends"]]) == (2, 0, ["SUCCEEDED"])


def test_each_job_for_a_model_that_sleeps_is_a_swap(tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CASES", {"a budget for two": (2.5, "0")})
    numbers = models.Numbers(swaps=3, seconds=2.0, turn=0.2, clients=1, size=64, steps=(1, 2))
    found = check(models.measure(tiny_qwen_image, numbers)).figures["cases"]["a budget for two"]
    assert (found["asleep"], len(found["wake_seconds"]), found["failed"]) == (3, 3, 0)
    assert min(found["load"][model]["jobs"] for model in models.NAMES) > 0
    # where something else wants the cores, two seconds do not go around
    assert max(found["load"][model]["awake"] for model in models.NAMES) > 0


def test_a_predicted_wait_is_compared_with_the_one_that_came(tiny_qwen_image: Path) -> None:
    case = "one that sleeps, one place"
    numbers = delay.Numbers(mixes=1, jobs=(6, 6), steps=(4, 8), gaps=(0.0,), cases=(case,))
    found = check(delay.measure(tiny_qwen_image, numbers)).figures["cases"][case]
    # all but the first wait, for those before them one after the other
    assert (found["jobs"], found["waited"], found["none_predicted"]) == (6, 5, 1)
    assert 0 < found["ratio"]["p5"] <= found["ratio"]["median"] <= found["ratio"]["p95"]
