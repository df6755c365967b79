"""Ranges of blocks over ranks, on made-up stacks: what one process makes."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import jobs, toys
from tests.parallel.ranks import ALL, PAIR, Ranks

EVERY = tuple(range(len(toys.ROWS)))


@pytest.mark.parametrize("apart", [False, True], ids=["", "taken apart"])
@pytest.mark.parametrize("size", [PAIR, ALL])
def test_ranks_do_what_one_process_does(ranks: Ranks, size: int, apart: bool) -> None:
    """Two blocks on two streams and one on the joint one: what is passed on changes its form."""
    sizes = ParallelSizes(pipeline_parallel_size=size)
    for rows in (EVERY, (2, 0)) if apart else (EVERY, (1,)):
        alone = jobs.run_toy(None, "dual_single", (), rows, apart)
        results = ranks.run(jobs.run_toy, "dual_single", ("pipeline_parallel",), rows, apart, sizes=sizes)
        for result in results:
            for stream, x in alone.out.items():
                torch.testing.assert_close(result.out[stream], x, rtol=0, atol=2e-6)
                assert torch.equal(result.out[stream], results[0].out[stream])
        assert sum(result.work.queries for result in results) == alone.work.queries


def test_parts_of_tokens_are_passed_on(ranks: Ranks) -> None:
    """Also none: a rank has no token of a row of one."""
    sizes = ParallelSizes(pipeline_parallel_size=2, sequence_parallel_size=2)
    for rows in (EVERY, (1,)):
        alone = jobs.run_toy(None, "dual_single", (), rows)
        features = ("pipeline_parallel", "sequence_parallel")
        for result in ranks.run(jobs.run_toy, "dual_single", features, rows, sizes=sizes):
            for stream, x in alone.out.items():
                torch.testing.assert_close(result.out[stream], x, rtol=0, atol=2e-5)


def test_fewer_blocks_than_ranks_are_refused_by_name(ranks: Ranks) -> None:
    sizes = ParallelSizes(pipeline_parallel_size=ALL)
    for said in ranks.run(jobs.refusal, "pipeline_parallel", toys.STACKS["cross"](), sizes=sizes):
        assert said == "transformer has 2 blocks, fewer than 3 ranks; use a pipeline_parallel_size of 2 at most"
