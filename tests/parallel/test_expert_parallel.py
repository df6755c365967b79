"""Experts over ranks, which have all tokens or parts of them: what one process with all experts makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.nn.moe import MixtureOfExperts
from omni_grpc.nn.stack import Stack
from omni_grpc.types.ranks import ParallelSizes
from tests.parallel import jobs, toys
from tests.parallel.ranks import Ranks

EXPERTS = 5
SIZES = {
    "all tokens, two ranks": ParallelSizes(tensor_parallel_size=2),
    "all tokens, three ranks": ParallelSizes(tensor_parallel_size=3),
    "parts of tokens, three ranks": ParallelSizes(ring_degree=3),
    "all tokens, and blocks": ParallelSizes(tensor_parallel_size=2, pipeline_parallel_size=2),
    "parts of tokens, and blocks": ParallelSizes(sequence_parallel_size=2, pipeline_parallel_size=2),
    "parts of tokens by heads": ParallelSizes(ulysses_degree=2),
    "both, in a ring": ParallelSizes(tensor_parallel_size=2, ring_degree=2),
    "both, with Ulysses": ParallelSizes(tensor_parallel_size=2, ulysses_degree=2),
    "two groups deep": ParallelSizes(ulysses_degree=2, sequence_parallel_size=4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    stack = Stack(only=[toys.Mixed(EXPERTS), toys.Mixed(EXPERTS)])
    toys.weigh(stack)
    for block in stack.requires_grad_(False).group("only"):
        block.get_submodule("moe.gate").weight.mul_(8)
    safetensors.torch.save_file({k: v.clone() for k, v in stack.state_dict().items()}, folder / WEIGHT_FILE)
    return folder


@pytest.mark.parametrize("way", SIZES)
def test_ranks_do_what_one_process_does_with_some_of_the_experts(ranks: Ranks, folder: Path, way: str) -> None:
    sizes = dataclasses.replace(SIZES[way], enable_expert_parallel=True)
    for rows in ((0, 1, 2, 3), (1,)):
        alone, weights = jobs.run_experts(None, folder, EXPERTS, rows)
        results = ranks.run(jobs.run_experts, folder, EXPERTS, rows, sizes=sizes)
        for out, _ in results:
            torch.testing.assert_close(out, alone, rtol=0, atol=2e-6)
            assert torch.equal(out, results[0][0])
        expert = 3 * 16 * 24
        shared = weights - 2 * EXPERTS * expert
        # of ranges of blocks, each rank has the experts of its own
        spread = sizes.pipeline_parallel_size == 1
        assert not spread or sum((had - shared) // expert for _, had in results) == 2 * EXPERTS
        assert all(had < weights for _, had in results)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            nn.ModuleDict({"moe": MixtureOfExperts(8, 8, 2, 1, stream="img")}),
            "moe has 2 experts, fewer than the 3 ranks",
        ),
        (nn.ModuleDict(), "transformer has no experts to share"),
    ],
    ids=["too few", "none"],
)
def test_what_ranks_cannot_share_is_refused_by_name(ranks: Ranks, module: nn.Module, said: str) -> None:
    sizes = ParallelSizes(tensor_parallel_size=3, enable_expert_parallel=True)
    for message in ranks.run(jobs.refusal, "expert_parallel", module, sizes=sizes):
        assert said in message
