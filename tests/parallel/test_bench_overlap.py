"""benchmarks.bench_overlap on processes that gloo joins: both sides of each way are built, compared and timed."""

from __future__ import annotations

import pytest

from benchmarks import bench_overlap
from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import bench_jobs
from tests.parallel.ranks import COUNT, Ranks

FLUX, WAN = (case.name for case in bench_overlap.tiny_cases())


@pytest.mark.parametrize(("model", "way"), [*((FLUX, way) for way in bench_overlap.WAYS), (WAN, "fetched")])
def test_a_way_is_timed_with_and_without_overlap(ranks: Ranks, model: str, way: str) -> None:
    sizes = ParallelSizes(pipeline_parallel_size=COUNT)
    each = ranks.run(bench_jobs.benchmark, model, [way], sizes=sizes)
    (m,) = each[0]
    assert (m.model, m.way, m.ranks, m.alike) == (model, way, COUNT, True)
    assert m.rows == (COUNT if way == "pipeline" else None)
    # micro-batches are other batches, and need not give the bits of the whole one
    assert m.error < 1e-5 if way == "pipeline" else m.error == 0
    assert [len(runs) for runs in m.runs.values()] == [bench_jobs.REPETITIONS] * 2
    assert all(min(m.runs[side]) <= getattr(m, side) <= max(m.runs[side]) for side in m.runs)
    # times are those of the slowest rank, which all of them have
    assert all(made[0].runs == m.runs for made in each)
    assert bench_overlap.table([m]).count("\n") == 1
