"""The benchmark of several GPUs behind the real server runs, on the CPU: each way makes the picture of one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .ranks import PAIR


@pytest.mark.service
@pytest.mark.timeout(400)  # seven servers, one after the other
def test_each_way_is_served_and_makes_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_ranks_served", "--tiny"],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    heading, *rows = done.stdout.splitlines()
    assert "images/s" in heading
    ways = [row[:18].strip() for row in rows]
    assert ways[:2] == ["one process", "replicas"]
    assert len(set(ways)) == 7
    for row in rows:
        gpus, *figures = row[18:].split()
        assert int(gpus) == (1 if row.startswith("one process") else PAIR)
        # in rows without images/s, seconds of one image and the largest difference are all but the figures of a loss
        differs = figures[2 if row.startswith(("one", "replicas")) else 1]
        assert int(differs) <= 1
    assert sum(len(row.split()) > 6 for row in rows) == 1, "one rank is lost"
