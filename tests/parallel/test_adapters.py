"""Adapters that ranks load while they run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from omni_grpc.types.lora import Lora
from omni_grpc.types.ranks import ParallelSizes
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel import adapter_jobs
from tests.parallel.alone import TOLERANCE
from tests.parallel.ranks import ONE, Ranks
from tests.worker.adapted import write

WAYS = {
    "tensor parallel": ParallelSizes(tensor_parallel_size=2),
    "pipeline parallel": ParallelSizes(pipeline_parallel_size=2),
    "HSDP": ParallelSizes(sequence_parallel_size=2, use_hsdp=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_has_its_part_of_what_it_loads_while_it_runs(
    ranks: Ranks, tiny_qwen_image: Path, tmp_path: Path, way: str
) -> None:
    file = write(tmp_path / "a.safetensors", 0)
    model = Model(ENTRIES["QwenImagePipeline"], tiny_qwen_image)
    base = dataclasses.replace(model.request(model.draft(steps=2)), id="base")
    lora = Lora(lora_id="a", uid="a@1")
    changed = dataclasses.replace(base, id="changed", loras=(lora,))
    from_start = dataclasses.replace(changed, loras=(dataclasses.replace(lora, uid="a"),))
    (alone,) = ranks.run(adapter_jobs.at_start, model.checkpoint, file, from_start, sizes=ONE)
    mine = ranks.run(adapter_jobs.at_start, model.checkpoint, file, from_start, sizes=WAYS[way])
    told = ranks.run(adapter_jobs.at_run_time, model.checkpoint, file, base, changed, sizes=WAYS[way])
    for (before, changed_by_it, after, _), expected in zip(told, mine, strict=True):
        assert torch.equal(changed_by_it, expected)
        assert torch.equal(before, after)
        assert (changed_by_it - before).abs().max() > 1e-3
    torch.testing.assert_close(mine[0], alone, rtol=0, atol=TOLERANCE)
    (whole,) = {one[3] for one in ranks.run(adapter_jobs.at_run_time, model.checkpoint, file, base, changed, sizes=ONE)}
    if way != "HSDP":
        assert all(0 < nbytes < whole for *_, nbytes in told), "a part, of rows, columns or blocks"


def test_a_rank_without_room_refuses_for_all(ranks: Ranks, tiny_qwen_image: Path, tmp_path: Path) -> None:
    """Or the ranks would disagree, and their group would be ended."""
    file = write(tmp_path / "a.safetensors", 0)
    model = Model(ENTRIES["QwenImagePipeline"], tiny_qwen_image)
    request = dataclasses.replace(model.request(model.draft(steps=1)), loras=(Lora(lora_id="a", uid="a@1"),))
    first, second = ranks.run(
        adapter_jobs.one_without_room, model.checkpoint, file, request, sizes=WAYS["tensor parallel"]
    )
    assert (first[0], second[0]) == ("LORA_NOT_LOADED", "LORA_CACHE_FULL")
    assert torch.equal(first[1], second[1])
