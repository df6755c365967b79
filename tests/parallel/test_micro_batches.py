"""Pipeline parallel in micro-batches: ranks compute at once, and make what one process makes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from omni_grpc.features.pipeline_parallel import _micro_batches
from omni_grpc.types.ranks import ParallelSizes
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel import micro_batch_jobs, toys
from tests.parallel.alone import Alone, close
from tests.parallel.model_jobs import Features
from tests.parallel.ranks import ALL, COUNT, PAIR, Ranks

EVERY = tuple(range(len(toys.ROWS)))


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ((7,), 4, [[0]]),
        ((5, 5, 5, 5), 4, [[0], [1], [2], [3]]),
        ((5, 5, 5, 5), 2, [[0, 1], [2, 3]]),
        ((1, 1, 1, 9), 2, [[0, 1, 2], [3]]),
        ((9, 1, 1, 1), 4, [[0], [1, 2, 3]]),
        ((4, 1, 4, 1, 4), 3, [[0, 1], [2, 3], [4]]),
        ((0, 0), 2, [[0, 1]]),
    ],
)
def test_rows_are_in_parts_of_like_sizes(tokens: tuple[int, ...], most: int, expected: list[list[int]]) -> None:
    """And of no more parts than make the largest one smaller."""
    assert [list(part) for part in _micro_batches(tokens, most)] == expected


def test_no_other_cut_has_a_smaller_largest_part() -> None:
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randint(0, 30) for _ in range(draw.randint(1, 7))]
        most = draw.randint(1, 5)
        parts = _micro_batches(tokens, most)
        assert len(parts) <= most
        assert [row for part in parts for row in part] == list(range(len(tokens)))
        cuts = itertools.chain.from_iterable(
            itertools.combinations(range(1, len(tokens)), count - 1) for count in range(1, min(most, len(tokens)) + 1)
        )
        least = min(
            max(sum(tokens[start:end]) for start, end in itertools.pairwise((0, *cut, len(tokens)))) for cut in cuts
        )
        assert max(sum(tokens[row] for row in part) for part in parts) == least


@pytest.mark.parametrize("size", [PAIR, ALL, COUNT])
@pytest.mark.parametrize("rows", [EVERY, (2, 0), (1,), (0, 1, 2, 3, 2, 1)], ids=str)
def test_ranks_make_what_one_process_makes(ranks: Ranks, size: int, rows: tuple[int, ...]) -> None:
    alone = micro_batch_jobs.pass_on(None, rows)
    sizes = ParallelSizes(pipeline_parallel_size=size)
    results = ranks.run(micro_batch_jobs.pass_on, rows, sizes=sizes)
    parts = len(_micro_batches([sum(toys.ROWS[row].lengths) for row in rows], size))
    assert (parts > 1) == (len(rows) > 1)
    for result in results:
        assert [call for call in result.calls if call.startswith("compute")] == [f"compute {n}" for n in range(parts)]
        for stream, x in alone.out.items():
            torch.testing.assert_close(result.out[stream], x, rtol=0, atol=2e-5)
            assert torch.equal(result.out[stream], results[0].out[stream])


@pytest.mark.parametrize("size", [PAIR, ALL, COUNT])
def test_a_rank_computes_while_the_next_one_does(ranks: Ranks, size: int) -> None:
    """Each rank goes on with a micro-batch only once the next one has begun with the one before."""
    sizes = ParallelSizes(pipeline_parallel_size=size)
    ranks.run(micro_batch_jobs.pass_on, EVERY, f"meeting of {size}", sizes=sizes)


def test_messages_are_on_their_way_while_a_rank_computes(ranks: Ranks) -> None:
    """Four rows on three ranks: three micro-batches of two streams, of which the last one has no text to send. What
    comes back is the joint stream.
    """
    first, second, last = (
        result.calls
        for result in ranks.run(micro_batch_jobs.pass_on, EVERY, sizes=ParallelSizes(pipeline_parallel_size=ALL))
    )
    shared = ["broadcast 0", "broadcast 1", "broadcast 2"]
    come = ["wait broadcast 0", "wait broadcast 1", "wait broadcast 2"]
    left = [f"wait isend {n}" for n in range(5)]
    assert first == [
        *("compute 0", "isend 0", "isend 1", "compute 1", "isend 2", "isend 3", "compute 2", "isend 4"),
        *(*shared, *come, *left),
    ]
    assert second == [
        *(
            "irecv 0",
            "irecv 1",
            "wait irecv 0",
            "wait irecv 1",
            "irecv 2",
            "irecv 3",
            "compute 0",
            "isend 0",
            "isend 1",
        ),
        *("wait irecv 2", "wait irecv 3", "irecv 4", "compute 1", "isend 2", "isend 3"),
        *("wait irecv 4", "compute 2", "isend 4"),
        *(*shared, *come, *left),
    ]
    assert [call for call in last if "irecv" in call] == [call for call in second if "irecv" in call]
    assert [call for call in last if "irecv" not in call] == [
        *("compute 0", "broadcast 0", "compute 1", "broadcast 1", "compute 2", "broadcast 2"),
        *come,
    ]


def test_without_overlap_a_batch_is_passed_on_whole(ranks: Ranks) -> None:
    sizes = ParallelSizes(pipeline_parallel_size=PAIR)
    for result in ranks.run(micro_batch_jobs.pass_on, EVERY, "", False, sizes=sizes):
        assert [call for call in result.calls if call.startswith("compute")] == ["compute 0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """FLUX, which has blocks of two kinds."""
    entry = ENTRIES["FluxPipeline"]
    return Alone(Model(entry, entry.build(tmp_path_factory.mktemp("checkpoints") / "flux")))


SHARED = {
    "alone": ParallelSizes(pipeline_parallel_size=2),
    "in a ring": ParallelSizes(pipeline_parallel_size=2, ring_degree=2),
    "with shared weights": ParallelSizes(pipeline_parallel_size=2, tensor_parallel_size=2),
}


@pytest.mark.parametrize("way", SHARED)
def test_requests_that_join_late_go_through_the_ranks(model: Alone, ranks: Ranks, way: str) -> None:
    made, *_ = model.on(ranks, SHARED[way], model.joins)
    close(made, model.made)


def test_with_batch_invariance_ranks_make_the_bits_of_one_process(model: Alone, ranks: Ranks) -> None:
    """Where a row does not depend on its batch, nor does it on its micro-batch."""
    invariant: Features = {"batch_invariant": True}
    made, *_ = model.on(ranks, ParallelSizes(pipeline_parallel_size=2), model.joins, invariant)
    expected = model.run(invariant, model.joins)
    assert all(torch.equal(made.latents[name], x) for name, x in expected.latents.items())
