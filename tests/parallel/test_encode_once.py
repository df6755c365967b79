"""Text encoders over ranks: the first one runs them, all get the same, and the others keep no weights."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.types.ranks import ParallelSizes
from tests.parallel.encoder_jobs import encode
from tests.parallel.ranks import ALL, PAIR, Ranks


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("size", [PAIR, ALL])
def test_one_rank_encodes_for_all(ranks: Ranks, size: int, pooled: bool) -> None:
    """Also after a prompt that the encoder refuses, which every rank refuses with the same words."""
    prompts = ("a red circle", "bad", "x")
    alone = encode(None, prompts, pooled)
    first, *others = ranks.run(encode, prompts, pooled, sizes=ParallelSizes(ring_degree=size))
    assert (first.calls, first.weights) == (3, alone.weights)
    assert [(one.calls, one.weights) for one in others] == [(0, 0)] * (size - 1)
    for seen in (first, *others):
        assert seen.error == alone.error == "prompt: is bad"
        for mine, its in zip(seen.embeds, alone.embeds, strict=True):
            assert torch.equal(mine.hidden, its.hidden)
            assert (mine.tokens, mine.dropped) == (its.tokens, its.dropped)
            assert (mine.pooled is None) == (its.pooled is None)
            if its.pooled is not None:
                assert torch.equal(mine.pooled, its.pooled)
