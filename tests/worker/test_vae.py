"""Native models decode in tiles where the server says so, and in fewer operations than diffusers where there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from omni_grpc.config import EngineConfig
from omni_grpc.loading.components import configure_vae
from omni_grpc.pipeline.tiles import Tiling
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.memory_model import MemoryModel, PixelLaw
from omni_grpc.types.request import Request
from omni_grpc.worker.packed import PackedRunner
from tests.models.cases import ENTRIES
from tests.models.model import Model


@pytest.mark.parametrize("name", ["QwenImagePipeline", "FluxPipeline-schnell", "WanPipeline", "HeliosPipeline"])
def test_what_is_larger_than_a_tile_is_decoded_in_tiles_and_the_reply_says_so(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    model = Model(entry, entry.build(tmp_path / "tiny"), vae_use_tiling=True, vae_use_slicing=True)
    vae = model.pipeline.vae
    request = model.request(dataclasses.replace(entry.drafts[0], width=64, height=64, steps=1, seeds=(1,)))
    whole, warnings = _decoded(model, request, model.ready.memory)
    assert warnings == [], "a tile is larger"
    vae.tiling = Tiling(edge=32, overlap=8)
    small = dataclasses.replace(model.ready.memory, tile_area=vae.tiling.area)
    tiled, warnings = _decoded(model, request, small)
    assert warnings == ["VAE_TILED"]
    again, warnings = _decoded(model, request, dataclasses.replace(small, always_tiled=False))
    assert warnings == []
    assert np.array_equal(again, whole)
    assert tiled.shape == whole.shape
    difference = np.abs(tiled.astype(int) - whole.astype(int))
    assert 0 < difference.mean() < whole.std()


def test_what_would_not_fit_whole_is_decoded_in_tiles_and_nothing_else(tmp_path: Path) -> None:
    entry = ENTRIES["QwenImagePipeline"]
    model = Model(entry, entry.build(tmp_path / "tiny"))
    model.pipeline.vae.tiling = Tiling(edge=32, overlap=8)
    memory = dataclasses.replace(
        model.ready.memory, tile_area=32 * 32, decode=PixelLaw(area=1000.0), capacity=1000.0 * 60 * 60
    )
    drafts = [dataclasses.replace(entry.drafts[0], width=64, height=height, steps=1) for height in (48, 64)]
    told = [_decoded(model, model.request(draft), memory)[1] for draft in drafts]
    assert told == [[], ["VAE_TILED"]]
    limited = [memory.need(model.request(draft)) for draft in drafts]
    assert all(need.alone <= memory.capacity for need in limited), "so neither is refused"


def test_the_setting_is_told_of_where_it_is_set(tmp_path: Path) -> None:
    entry = ENTRIES["QwenImagePipeline"]
    folder = entry.build(tmp_path / "tiny")
    found = [Model(entry, folder, vae_use_tiling=on).ready.memory for on in (False, True)]
    assert [memory.always_tiled for memory in found] == [False, True]
    assert all(memory.tile_area == 512 * 512 and not memory.limited for memory in found)


def _decoded(model: Model, request: Request, memory: MemoryModel) -> tuple[Any, list[str]]:
    """The pixels of the first output, and the codes of the warnings."""
    runner = PackedRunner(model.pipeline, model.device, "omni-test-", memory=memory)
    joined, join = [], model.pipeline.join
    model.pipeline.join = lambda parts: (joined.append(join(parts)), joined[-1])[1]
    try:
        runner.prepare(request)
        progress = runner.step((request.id,)).progress
        while not progress[0].finished:
            progress = runner.step((request.id,)).progress
        report = runner.decode(request.id)
    finally:
        del model.pipeline.join
    shared.discard_all([media.data for media in report.media])
    return joined[0].pixels, [warning.code for warning in report.warnings]


@pytest.mark.parametrize("name", ["QwenImagePipeline", "WanPipeline", "WanImageToVideoPipeline", "HeliosPipeline"])
def test_no_causal_vae_convolves_in_three_dimensions_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ENTRIES[name]
    model, called = Model(entry, entry.build(tmp_path / "tiny")), mock.MagicMock()
    monkeypatch.setattr(torch.nn.functional, "conv3d", called)
    assert model.run(entry.drafts[0])[0].images
    assert not called.called


def test_a_vae_without_the_method_is_refused() -> None:
    settings = EngineConfig.from_settings(model="m", vae_use_tiling=True).adapter
    with pytest.raises(ConfigError, match="--vae-use-tiling: NoneType has no enable_tiling"):
        configure_vae(None, settings)
