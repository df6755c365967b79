"""Weights that are kept once by some of the ranks that share tokens, and again by the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from omni_grpc.types.ranks import ParallelSizes
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel.alone import Alone
from tests.parallel.ranks import COUNT, Ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    entry = ENTRIES["QwenImagePipeline"]
    return Alone(Model(entry, entry.build(tmp_path_factory.mktemp("checkpoints") / "qwen")))


@pytest.mark.parametrize("ways", [{"sequence_parallel_size": 4}, {"ulysses_degree": 2, "ring_degree": 2}], ids=str)
def test_what_is_computed_is_the_same_and_memory_lies_between(alone: Alone, ranks: Ranks, ways: dict[str, int]) -> None:
    whole = ParallelSizes(**ways)
    sharded = dataclasses.replace(whole, use_hsdp=True)
    pairs = dataclasses.replace(sharded, hsdp_shard_size=2)
    expected, in_four, in_two = (alone.on(ranks, sizes, alone.joins) for sizes in (whole, sharded, pairs))
    for made in (in_four, in_two):
        assert all(torch.equal(made[0].latents[name], x) for name, x in expected[0].latents.items())
    weights = [[made.weights for made in results] for results in (expected, in_four, in_two)]
    assert all(of == [of[0]] * COUNT for of in weights), "no rank has more than another"
    (everything, *_), (quarters, *_), (halves, *_) = weights
    # what leaves a rank: half of the blocks, or three quarters of them, up to the padding of parts
    assert (everything - halves) / (everything - quarters) == pytest.approx(2 / 3, rel=0.01)
