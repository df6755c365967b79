"""Tensor parallel of a made-up module: parts of unlike sizes, norms over all heads, grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import JOINT
from omni_grpc.types.ranks import ParallelSizes
from omni_grpc.types.spec import Split, SplitKind
from tests.parallel import jobs, toys
from tests.parallel.ranks import ALL, PAIR, Ranks

COLUMN = Split(SplitKind.COLUMN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of toys.Wide, in which queries, keys and values are apart."""
    module = toys.Wide()
    toys.weigh(module)
    weights = dict(module.named_parameters())
    sizes = [toys.CHANNELS, toys.KV_HEADS * toys.HEAD_SIZE, toys.KV_HEADS * toys.HEAD_SIZE]
    for leaf in ("weight", "bias"):
        parts = weights.pop(f"to_qkv.{leaf}").split(sizes)
        weights |= {f"{name}.{leaf}": part for name, part in zip(("to_q", "to_k", "to_v"), parts, strict=True)}
    safetensors.torch.save_file(
        {name: weight.detach().clone() for name, weight in weights.items()}, tmp_path / WEIGHT_FILE
    )
    return tmp_path


@pytest.mark.parametrize("size", [PAIR, ALL])
def test_ranks_do_what_one_process_does_with_a_part_of_the_weights(ranks: Ranks, folder: Path, size: int) -> None:
    alone, shapes = jobs.run_wide(None, folder)
    results = ranks.run(jobs.run_wide, folder, sizes=ParallelSizes(tensor_parallel_size=size))
    for out, parts in results:
        torch.testing.assert_close(out, alone, rtol=0, atol=2e-5)
        assert torch.equal(out, results[0][0])
        for name, dimension in (("to_qkv", 0), ("up", 0), ("out", 1)):
            whole = list(shapes[f"{name}.weight"])
            whole[dimension] //= size
            assert parts[f"{name}.inner.weight"] == tuple(whole)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [PAIR, ALL])
def test_scales_in_8_bits_are_those_of_whole_tokens_and_rows(ranks: Ranks, size: int, kind: torch.dtype) -> None:
    """The codes are those of one process, so the results differ by the rounding of float32 alone."""
    alone = jobs.run_rows_in_8_bits(None, kind)
    for out in ranks.run(jobs.run_rows_in_8_bits, kind, sizes=ParallelSizes(tensor_parallel_size=size)):
        torch.testing.assert_close(out, alone, rtol=1e-6, atol=1e-4)


def test_batch_invariance_takes_two_ranks(ranks: Ranks) -> None:
    sizes = ParallelSizes(tensor_parallel_size=ALL)
    for said in ranks.run(jobs.refusal, "invariant tensor_parallel", linear(9), {"to_qkv": COLUMN}, sizes=sizes):
        assert "batch_invariant takes a tensor_parallel_size of 2 at most" in said


def linear(features: int) -> nn.Module:
    return nn.ModuleDict({"to_qkv": Linear(features, features, stream=JOINT)})


REFUSED: Mapping[str, tuple[nn.Module, Mapping[str, Split], str]] = {
    "heads": (
        nn.ModuleDict({"attention": Attention(4, 8)}),
        {"attention": Split(SplitKind.HEADS)},
        "transformer.attention has 4 heads, which 3 ranks cannot share evenly; use a tensor parallel size that divides",
    ),
    "key/value heads": (
        nn.ModuleDict({"attention": Attention(6, 8, 2)}),
        {"attention": Split(SplitKind.HEADS)},
        "transformer.attention has 2 key/value heads",
    ),
    "outputs": (linear(12), {"to_qkv": COLUMN}, "transformer.to_qkv has 4 output channels, which 3 ranks"),
    "inputs": (linear(8), {"to_qkv": Split(SplitKind.ROW)}, "transformer.to_qkv has 8 input channels, which 3 ranks"),
    "parts": (
        linear(9),
        {"to_qkv": Split(SplitKind.ROW, (1, 4))},
        "9 input channels, which are not parts of sizes (1, 4)",
    ),
    "no table": (linear(9), {}, "Toy: tensor parallel is not served yet for 'transformer'"),
    "no such module": (linear(9), {"to_kqv": COLUMN}, "Toy: no module of 'transformer' is called 'to_kqv'"),
    "no linear": (nn.ModuleDict({"to_qkv": nn.Linear(9, 9)}), {"to_qkv": COLUMN}, "transformer.to_qkv is a Linear"),
    "grouped": (
        nn.ModuleDict({"to_qkv": Linear(9, 9, stream=JOINT), "attention": Attention(6, 8, 3)}),
        {"to_qkv": COLUMN},
        "transformer.to_qkv is made of to_q, to_k, to_v: with grouped-query attention its Split needs `parts`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_spread_is_refused_by_name(ranks: Ranks, case: str) -> None:
    module, splits, message = REFUSED[case]
    sizes = ParallelSizes(tensor_parallel_size=ALL)
    for said in ranks.run(jobs.refusal, "tensor_parallel", module, splits, sizes=sizes):
        assert message in said
