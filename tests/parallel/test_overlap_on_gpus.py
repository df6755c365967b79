"""Over NCCL, ranks make the same whether messages are on their way while they compute or are waited for at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_overlap
from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import bench_jobs
from tests.parallel.ranks import PAIR, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < PAIR, reason="needs two CUDA devices"),
]


def test_each_way_makes_the_same_with_and_without_overlap(tmp_path: Path) -> None:
    sizes, ways = ParallelSizes(pipeline_parallel_size=PAIR), list(bench_overlap.WAYS)
    with Ranks(tmp_path, "nccl", PAIR) as ranks:
        for case in bench_overlap.tiny_cases():
            made, *_ = ranks.run(bench_jobs.benchmark, case.name, ways, sizes=sizes)
            assert [m.way for m in made] == ways
            for m in made:
                assert m.alike
                # micro-batches are other batches, whose products may be summed in another order, in TF32
                assert m.error < 1e-3 if m.way == "pipeline" else m.error == 0
