"""benchmarks.bench_overlap on processes that gloo joins: both sides of each way are built, compared and timed."""

from __future__ import annotations

from benchmarks import bench_overlap
from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import bench_jobs
from tests.parallel.ranks import COUNT, Ranks


def test_each_way_is_timed_with_and_without_overlap(ranks: Ranks) -> None:
    sizes = ParallelSizes(pipeline_parallel_size=COUNT)
    made, *others = ranks.run(bench_jobs.benchmark, list(bench_overlap.WAYS), sizes=sizes)
    assert [(m.model, m.way) for m in made] == [
        (case.name, way) for case in bench_overlap.tiny_cases() for way in bench_overlap.WAYS
    ]
    for m in made:
        assert (m.ranks, m.rows, m.alike) == (COUNT, COUNT if m.way == "pipeline" else None, True)
        # micro-batches are other batches, and need not give the bits of the whole one
        assert m.error < 1e-5 if m.way == "pipeline" else m.error == 0
        assert [len(runs) for runs in m.runs.values()] == [bench_jobs.REPETITIONS] * 2
        assert all(min(m.runs[side]) <= getattr(m, side) <= max(m.runs[side]) for side in m.runs)
    # times are those of the slowest rank, which all of them have
    assert all([m.runs for m in each] == [m.runs for m in made] for each in others)
    assert bench_overlap.table(made).count("\n") == len(made)
