"""What a worker does with ranks, from its load to pixels: warm-up, weights, branches and decode are shared at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_grpc.feature_rules.ranks import check_sizes
from omni_grpc.types.ranks import ParallelSizes
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel.model_jobs import serve
from tests.parallel.ranks import COUNT, Ranks

SIZES = {
    "weights and branches": ParallelSizes(tensor_parallel_size=2, cfg_parallel_size=2, vae_patch_parallel_size=2),
    "a ring with sharded weights": ParallelSizes(ring_degree=2, use_hsdp=True, vae_patch_parallel_size=2),
    "blocks and tokens": ParallelSizes(pipeline_parallel_size=2, sequence_parallel_size=2, vae_patch_parallel_size=4),
}


@pytest.mark.parametrize("way", SIZES)
def test_a_worker_on_ranks_makes_the_picture_of_one_process(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """Each rank has a clock of its own, and warms up for as long as the first one does."""
    entry = ENTRIES["QwenImagePipeline"]
    model = Model(entry, entry.build(tmp_path / "checkpoint"))
    assert check_sizes(model.checkpoint, SIZES[way], COUNT) == {}
    request = model.request(model.guided(higher=1, steps=3, seeds=(1, 2)))
    alone, _ = serve(None, model.checkpoint, request, 0.0)
    results = ranks.run(serve, model.checkpoint, request, 0.5, sizes=SIZES[way])
    for pixels, cost in results:
        assert torch.equal(pixels, results[0][0])
        assert (pixels.int() - alone.int()).abs().max() <= 1
        assert cost.step_ms((64,)) > 0
    assert alone.float().std() > 1, "there is something to be seen"
