"""Guidance branches over ranks: any number of branches on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import branch_jobs
from tests.parallel.ranks import ALL, PAIR, Ranks


@pytest.mark.parametrize("size", [PAIR, ALL])
@pytest.mark.parametrize("branches", [(1,), (2,), (3,), (1, 3, 2), (2, 2, 1, 3)], ids=str)
def test_predictions_are_those_of_one_process(ranks: Ranks, branches: tuple[int, ...], size: int) -> None:
    """Bit for bit. What a rank has predicted is counted over three steps, of which the last lacks the first state."""
    alone = branch_jobs.predict_branches(None, branches)
    results = ranks.run(branch_jobs.predict_branches, branches, sizes=ParallelSizes(cfg_parallel_size=size))
    for step, expected in enumerate(alone.predictions):
        assert all(torch.equal(result.predictions[step], expected) for result in results)
    idle = max(0, size - sum(branches))
    assert sum(result.rows for result in results) == alone.rows + idle, "a rank without rows predicts one, once"
    if sum(branches) >= size:
        assert all(result.rows for result in results)
        assert max(result.tokens for result in results) < alone.tokens


def test_a_row_stays_where_it_was_and_new_ones_go_where_there_is_least(ranks: Ranks) -> None:
    for owners in ranks.run(branch_jobs.assign_twice, sizes=ParallelSizes(cfg_parallel_size=2)):
        assert owners == [[0, 1, 1], [1, 1, 0, 0]]
