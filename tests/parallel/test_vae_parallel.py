"""Decodes over ranks: the pixels of one process, of every kind of VAE and of made-up decoders."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omni_grpc.types.ranks import ParallelSizes
from tests.models.cases import ENTRIES
from tests.parallel import vae_jobs
from tests.parallel.ranks import ALL, PAIR, Ranks

TOLERANCE = 2e-5
"""Of pixels in -1..1; a step of 8 bits is 8e-3."""


def sizes(ranks: int) -> ParallelSizes:
    return ParallelSizes(sequence_parallel_size=ranks, vae_patch_parallel_size=ranks)


VAES = ("FluxPipeline", "QwenImagePipeline", "WanPipeline", "WanPipeline-ti2v")
"""One model for each kind of decoder."""


@pytest.fixture(scope="module", params=VAES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    from omni_grpc.checkpoint.registry import open_checkpoint

    return open_checkpoint(ENTRIES[request.param].build(tmp_path_factory.mktemp("checkpoints") / request.param))


def test_pixels_are_those_of_one_process(checkpoint: object, ranks: Ranks) -> None:
    """Of slabs of unlike sizes, wider than high, and of one row; with fewer rows than ranks all decode the whole."""
    shapes = [(1, 7, 5), (3, 4, 6), (1, 3, 9), (1, 1, 4)]
    alone = vae_jobs.decode(None, checkpoint, shapes)
    results = ranks.run(vae_jobs.decode, checkpoint, shapes, sizes=sizes(ALL))
    for number, expected in enumerate(alone):
        for made in results:
            torch.testing.assert_close(made[number], expected, rtol=0, atol=TOLERANCE)
            assert torch.equal(made[number], results[0][number])
        assert expected.std() > 0.01, "there is something to be seen"


def test_a_rank_computes_its_slab_alone(ranks: Ranks) -> None:
    """12 rows over 3 ranks: each convolution computes 4 of them, and one or two beside."""
    whole = vae_jobs.rows_computed(None, 12)
    for rank, rows in enumerate(ranks.run(vae_jobs.rows_computed, 12, sizes=sizes(ALL))):
        beside = 1 if rank in (0, 2) else 2
        assert rows == [one // 3 + beside for one in whole]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Conv2d(4, 4, 3, stride=2), "rows of the decoder's layer"),
        (nn.Conv2d(4, 4, 2), "rows of the decoder's layer"),
        (nn.InstanceNorm2d(4), "the decoder's layer is a InstanceNorm2d, whose rows cannot be shared yet"),
    ],
    ids=["stride", "even", "unknown"],
)
def test_a_layer_whose_rows_are_not_known_is_refused_by_name(ranks: Ranks, layer: nn.Module, said: str) -> None:
    for message in ranks.run(vae_jobs.refusal, nn.ModuleDict({"layer": layer}), sizes=sizes(PAIR)):
        assert message.startswith("--vae-patch-parallel-size must be 1: ")
        assert said in message


@pytest.mark.parametrize("checkpoint", ["FluxPipeline"], indirect=True)
def test_tiles_are_refused(checkpoint: object, ranks: Ranks) -> None:
    for message in ranks.run(vae_jobs.with_tiling, checkpoint, sizes=sizes(PAIR)):
        assert "cannot be combined with vae_use_tiling" in message
