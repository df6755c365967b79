"""What is on its way between ranks while they compute is begun before that and waited for after it, and the bits are
those of ranks that wait at once.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import overlap_jobs, toys
from tests.parallel.ranks import PAIR, Ranks

EVERY = tuple(range(len(toys.ROWS)))
SIZES = {
    "Ulysses": ParallelSizes(ulysses_degree=PAIR),
    "fetched": ParallelSizes(sequence_parallel_size=PAIR),
    "fetched in float64": ParallelSizes(sequence_parallel_size=PAIR),
    "ring": ParallelSizes(ring_degree=PAIR),
}
OUT = ("all_to_all_single 2", "wait all_to_all_single 2")
"""What Ulysses' second all-to-all takes; nothing is left to compute until it has come."""

ORDERS: dict[tuple[str, str], tuple[str, ...]] = {
    # the values leave while queries and keys are normed, and these while the feed-forward is computed
    ("single", "Ulysses"): (
        *("attn.to_qkv", "all_to_all_single 0", "norm", "all_to_all_single 1", "proj_mlp"),
        *("wait all_to_all_single 1", "wait all_to_all_single 0", "attention", *OUT, "proj_out"),
    ),
    ("single", "fetched"): (
        *("attn.to_qkv", "all_to_all_single 0", "norm", "all_to_all_single 1", "proj_mlp"),
        *("wait all_to_all_single 1", "wait all_to_all_single 0", "attention", "proj_out"),
    ),
    ("single", "fetched in float64"): (
        *("attn.to_qkv", "all_to_all_single 0", "norm", "all_to_all_single 1", "proj_mlp"),
        *("wait all_to_all_single 1", "wait all_to_all_single 0", "attention", "proj_out"),
    ),
    ("single", "ring"): (
        *("attn.to_qkv", "norm", "batch_isend_irecv 0", "proj_mlp", "attention"),
        *("wait batch_isend_irecv 0", "wait batch_isend_irecv 0", "attention", "proj_out"),
    ),
    ("dual", "Ulysses"): (
        *("attn.add_qkv_proj", "attn.to_qkv", "all_to_all_single 0", "norm", "all_to_all_single 1"),
        *("wait all_to_all_single 1", "wait all_to_all_single 0", "attention", *OUT, "attn.to_add_out"),
    ),
    ("dual", "fetched"): (
        *("attn.add_qkv_proj", "attn.to_qkv", "all_to_all_single 0", "norm", "all_to_all_single 1"),
        *("wait all_to_all_single 1", "wait all_to_all_single 0", "attention", "attn.to_add_out"),
    ),
}


@pytest.mark.parametrize(("kind", "way"), ORDERS, ids=map(" ".join, ORDERS))
def test_messages_are_on_their_way_while_ranks_compute(ranks: Ranks, kind: str, way: str) -> None:
    order = ORDERS[kind, way]
    for result in ranks.run(overlap_jobs.attend, kind, way, EVERY, True, sizes=SIZES[way]):
        assert tuple(result.calls[: len(order)]) == order


@pytest.mark.parametrize(("kind", "way"), ORDERS, ids=map(" ".join, ORDERS))
@pytest.mark.parametrize("rows", [EVERY, (1,), (2, 0)], ids=str)
def test_the_bits_are_those_of_ranks_that_wait(ranks: Ranks, kind: str, way: str, rows: tuple[int, ...]) -> None:
    beside, *_ = ranks.run(overlap_jobs.attend, kind, way, rows, True, sizes=SIZES[way])
    waited, *_ = ranks.run(overlap_jobs.attend, kind, way, rows, False, sizes=SIZES[way])
    assert all(torch.equal(beside.out[stream], x) for stream, x in waited.out.items())
    # nothing is computed between a message and the wait for it, but for what a ring holds
    # after the blocks, streams are gathered together
    calls = waited.calls
    last = max(number for number, call in enumerate(calls) if "all_to_all" not in call)
    for call, after in itertools.pairwise(calls[:last]):
        if call.startswith("all_to_all_single"):
            assert after == f"wait {call}"


def test_the_next_blocks_weights_come_while_a_block_computes(ranks: Ranks) -> None:
    """In a group of their own, so that the messages of the block do not wait for them."""
    sizes = ParallelSizes(sequence_parallel_size=PAIR, use_hsdp=True)
    for passed, apart in ranks.run(overlap_jobs.gather_weights, True, sizes=sizes):
        assert apart
        assert passed.calls == [
            *("gather 0", "wait gather 0", "gather 1", "compute 0"),
            *("wait gather 1", "gather 2", "compute 1"),
            *("wait gather 2", "compute 2"),
        ]


def test_weights_can_be_waited_for_at_once(ranks: Ranks) -> None:
    sizes = ParallelSizes(sequence_parallel_size=PAIR, use_hsdp=True)
    beside = ranks.run(overlap_jobs.gather_weights, True, sizes=sizes)
    for (passed, _), (expected, _) in zip(
        ranks.run(overlap_jobs.gather_weights, False, sizes=sizes), beside, strict=True
    ):
        assert passed.calls == [call for n in range(3) for call in (f"gather {n}", f"wait gather {n}", f"compute {n}")]
        assert all(torch.equal(passed.out[stream], x) for stream, x in expected.out.items())
