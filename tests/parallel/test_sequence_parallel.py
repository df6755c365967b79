"""Sequence parallel, with and without Ulysses, on made-up stacks: two ranks and three do what one process does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from omni_grpc.nn.attention import Attention
from omni_grpc.nn.rows import Row
from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import compile_jobs, jobs, toys
from tests.parallel.ranks import ALL, PAIR, Ranks

PLAIN, ULYSSES = ("sequence_parallel",), ("ulysses", "sequence_parallel")
EVERY = tuple(range(len(toys.ROWS)))
TOLERANCE = 2e-5


def shared(size: int, features: tuple[str, ...]) -> ParallelSizes:
    return ParallelSizes(ulysses_degree=size) if "ulysses" in features else ParallelSizes(sequence_parallel_size=size)


DEEP = {
    "ring of two": ParallelSizes(ring_degree=2),
    "ring of three": ParallelSizes(ring_degree=3),
    "Ulysses in a ring": ParallelSizes(ulysses_degree=2, ring_degree=2),
    "Ulysses and fetched": ParallelSizes(ulysses_degree=2, sequence_parallel_size=4),
}
"""More than one way at once, or keys and values that go around."""


def together(
    ranks: Ranks, size: int, name: str, features: tuple[str, ...], rows: tuple[int, ...] = EVERY, *, apart: bool = False
) -> tuple[jobs.Work, list[jobs.Work]]:
    """What it takes one process, and what each rank. All make the same: ranks bit for bit."""
    return _compared(ranks, shared(size, features), name, features, rows, apart)


def _compared(
    ranks: Ranks, sizes: ParallelSizes, name: str, features: tuple[str, ...], rows: tuple[int, ...], apart: bool
) -> tuple[jobs.Work, list[jobs.Work]]:
    alone = jobs.run_toy(None, name, (), rows, apart)
    results = ranks.run(jobs.run_toy, name, features, rows, apart, sizes=sizes)
    for result in results:
        assert result.out.keys() == alone.out.keys()
        for stream, x in alone.out.items():
            torch.testing.assert_close(result.out[stream], x, rtol=0, atol=TOLERANCE)
            assert torch.equal(result.out[stream], results[0].out[stream])
        assert result.norms == results[0].norms == pytest.approx(alone.norms, rel=1e-5)
    return alone.work, [result.work for result in results]


@pytest.mark.parametrize("size", [PAIR, ALL])
@pytest.mark.parametrize("features", [PLAIN, ULYSSES], ids="+".join)
@pytest.mark.parametrize("name", toys.SERVED)
def test_ranks_do_what_one_process_does(ranks: Ranks, name: str, features: tuple[str, ...], size: int) -> None:
    for rows in (EVERY, (2,), (1,), (3, 1)):
        alone, shares = together(ranks, size, name, features, rows)
        assert sum(work.queries for work in shares) == alone.queries, "each query is one rank's"
        if features == PLAIN:
            assert [work.keys for work in shares] == [alone.keys] * size, "keys are fetched"
        elif name != "cross":
            assert [work.keys for work in shares] == [alone.keys // size] * size, "heads are shared"


@pytest.mark.parametrize("apart", [False, True], ids=["", "taken apart"])
@pytest.mark.parametrize("way", DEEP)
@pytest.mark.parametrize("name", toys.SERVED)
def test_rings_and_two_ways_at_once_do_what_one_process_does(ranks: Ranks, name: str, way: str, apart: bool) -> None:
    features = ULYSSES if DEEP[way].ulysses_degree > 1 else PLAIN
    for rows in (EVERY, (2, 0)) if apart else (EVERY, (1,), (3, 1)):
        alone, shares = _compared(ranks, DEEP[way], name, features, rows, apart)
        if DEEP[way].ring_degree > 1:
            assert name == "cross" or all(work.keys == 0 for work in shares), "keys come in parts"
        else:
            assert sum(work.queries for work in shares) == alone.queries


def test_a_ring_takes_rows_of_any_length(ranks: Ranks) -> None:
    """Rows of one token, of fewer tokens than ranks, and of odd numbers, in one call."""
    draw = random.Random(1)
    for sizes in (ParallelSizes(ring_degree=3), ParallelSizes(ring_degree=4)):
        lengths = [1, 2, *(draw.randint(1, 40) for _ in range(4)), 0, 3]
        alone = jobs.attend_ring(None, lengths)
        for out in ranks.run(jobs.attend_ring, lengths, sizes=sizes):
            torch.testing.assert_close(out, alone, rtol=0, atol=TOLERANCE)


def test_a_ring_refuses_a_backend_that_computes_no_parts(ranks: Ranks) -> None:
    module = nn.ModuleDict({"block": Attention(4, 8)})
    module["block"].backend = "FP8_EMULATION"
    for said in ranks.run(jobs.refusal, "sequence_parallel", module, sizes=DEEP["ring of two"]):
        assert "FP8_EMULATION gives no log-sum-exp" in said
        assert "sequence_parallel_size in place of ring_degree" in said


@pytest.mark.parametrize(
    "features",
    [("attention", *PLAIN), ("attention", *ULYSSES), ("ulysses", "attention", "sequence_parallel")],
    ids="+".join,
)
@pytest.mark.parametrize("name", toys.SERVED)
def test_attention_that_was_chosen_by_role_is_spread_alike(ranks: Ranks, name: str, features: tuple[str, ...]) -> None:
    """In float64 within, whichever is applied first."""
    alone, shares = together(ranks, PAIR, name, features, (0, 2))
    assert sum(work.queries for work in shares) == alone.queries
    assert all(torch.float64 in work.dtypes for work in shares)


def test_keys_that_every_rank_has_stay_where_they_are(ranks: Ranks) -> None:
    """Each of the two blocks has one attention within the image, whose heads are shared, and one to the text."""
    _, shares = together(ranks, PAIR, "cross", ULYSSES)
    txt, img = (sum(column) for column in zip(*(row.lengths for row in toys.ROWS), strict=True))
    assert [work.keys for work in shares] == [2 * (img * toys.KV_HEADS // PAIR + txt * toys.KV_HEADS)] * PAIR


@pytest.mark.parametrize("features", [PLAIN, ULYSSES], ids="+".join)
def test_attention_that_skips_sequence_parallel_stays_within_each_rank(ranks: Ranks, features: tuple[str, ...]) -> None:
    whole = jobs.run_toy(None, "skipping", (), EVERY).work
    results = ranks.run(jobs.run_toy, "skipping", features, EVERY, sizes=shared(PAIR, features))
    shares = [result.work for result in results]
    assert sum(work.queries for work in shares) == whole.queries
    assert sum(work.keys for work in shares) == whole.keys


@pytest.mark.parametrize("features", [PLAIN, ULYSSES], ids="+".join)
@pytest.mark.parametrize("name", toys.SERVED)
def test_ranks_agree_on_totals_and_take_rows_apart_by_them(ranks: Ranks, name: str, features: tuple[str, ...]) -> None:
    together(ranks, PAIR, name, features, apart=True)


def test_a_block_with_ulysses_compiles_once_for_many_geometries(ranks: Ranks) -> None:
    # no size is 1, nor equal to a size of the weights: torch gives equal sizes one symbol, and then makes it a constant
    sizes = [Row.of(txt=7, img=35), Row.of(txt=19, img=24), Row.of(txt=12, img=26)]
    for counts in ranks.run(
        compile_jobs.compile_block, sizes, [(0, 1, 2), (0, 1), (2, 1, 0, 1)], sizes=shared(PAIR, ULYSSES)
    ):
        assert counts[0] == counts[1] == counts[2], counts


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "what"), [(4, 4, "4 heads"), (6, 2, "2 key/value heads")])
def test_heads_that_ranks_cannot_share_are_refused_by_name(ranks: Ranks, heads: int, kv_heads: int, what: str) -> None:
    module = nn.ModuleDict({"block": Attention(heads, 8, kv_heads)})
    messages = ranks.run(jobs.refusal, "ulysses", module, sizes=shared(ALL, ULYSSES))
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"transformer.block has {what}, which 3 ranks cannot share evenly; use ")
    module["block"] = Attention(heads, 8, kv_heads, skip_sequence_parallel=True)
    assert ranks.run(jobs.refusal, "ulysses", module, sizes=shared(ALL, ULYSSES)) == [""] * ALL


def test_attention_to_a_stream_that_is_spread_in_part_is_refused(ranks: Ranks) -> None:
    for features in (PLAIN, ULYSSES):
        for message in ranks.run(jobs.break_down, "halfway", features, sizes=shared(PAIR, features)):
            assert message == "attention over 'joint', of which img is spread over ranks and the rest is not"


def test_causal_attention_needs_ulysses(ranks: Ranks) -> None:
    for message in ranks.run(jobs.break_down, "causal", PLAIN, sizes=shared(PAIR, PLAIN)):
        assert "let ranks share its heads" in message
    together(ranks, PAIR, "causal", ULYSSES)


@pytest.mark.parametrize("feature", jobs.RANKED)
def test_one_rank_is_refused(feature: str) -> None:
    assert "there is one" in jobs.refusal(None, feature, nn.ModuleDict())
