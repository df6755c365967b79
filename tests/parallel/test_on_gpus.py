"""Native models on two GPUs that NCCL joins: what each parallel feature makes is what one GPU makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.types.ranks import ParallelSizes
from tests.features.suite import FAMILIES, cosine
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel import vae_jobs
from tests.parallel.alone import ALL_WAYS, Alone, close, differ, skips_alike
from tests.parallel.ranks import PAIR, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < PAIR, reason="needs two CUDA devices"),
]

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks"), "nccl", PAIR) as started:
        yield started


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Alone:
    entry = ENTRIES[FAMILIES[request.param]]
    return Alone(Model(entry, entry.build(tmp_path_factory.mktemp("checkpoints") / request.param)), ranks)


PAIRS = {name: sizes for name, sizes in ALL_WAYS.items() if sizes.world == PAIR}
"""The ways to use two ranks."""


@pytest.mark.parametrize("way", PAIRS)
def test_ranks_make_what_one_gpu_makes(alone: Alone, ranks: Ranks, way: str) -> None:
    results = alone.on(ranks, PAIRS[way], alone.joins)
    close(results[0], alone.made, TOLERANCE)
    # attention in parts (a ring) is another kernel than the one that counts its queries
    assert all(made.work.queries < alone.made.work.queries for made in results)
    sizes = PAIRS[way]
    splits = sizes.tensor_parallel_size > 1 or sizes.pipeline_parallel_size > 1 or sizes.use_hsdp
    assert (results[0].weights < alone.made.weights) == splits


@pytest.mark.parametrize("way", PAIRS)
def test_ranks_skip_the_rows_that_one_gpu_skips(alone: Alone, ranks: Ranks, way: str) -> None:
    skips_alike(alone, ranks, way, TOLERANCE)


IN_8_BITS = {"fp8": 0.99, "int8": 0.999}
"""Least cosine of latents of two GPUs and of one: sums over ranks are rounded otherwise, of fp8 by kernels too."""


@pytest.mark.parametrize("scheme", IN_8_BITS)
@pytest.mark.parametrize("way", PAIRS)
def test_ranks_in_8_bits_make_what_one_gpu_makes_in_8_bits(alone: Alone, ranks: Ranks, way: str, scheme: str) -> None:
    features = {"quantization": scheme}
    expected = alone.run(features, alone.joins)
    results = alone.on(ranks, PAIRS[way], alone.joins, features)
    assert differ(expected, alone.made)
    assert all(cosine(results[0].latents[name], x) > IN_8_BITS[scheme] for name, x in expected.latents.items())


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline"])
def test_two_gpus_decode_what_one_decodes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(ENTRIES[name].build(tmp_path / name))
    shapes = [(1, 7, 5), (3, 4, 6)]
    alone = ranks.run(vae_jobs.decode, checkpoint, shapes, sizes=ParallelSizes())[0]
    sizes = ParallelSizes(ring_degree=PAIR, vae_patch_parallel_size=PAIR)
    for results in zip(*ranks.run(vae_jobs.decode, checkpoint, shapes, sizes=sizes), alone, strict=True):
        *made, expected = results
        for pixels in made:
            torch.testing.assert_close(pixels, expected, rtol=0, atol=TOLERANCE)
