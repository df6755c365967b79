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
from omni_grpc.types.errors import ConfigError
from tests.models.cases import ENTRIES
from tests.models.model import Model

SMALL = {"tile_sample_min_height": 32, "tile_sample_min_width": 32, "tile_sample_stride_height": 24,
         "tile_sample_stride_width": 24, "tile_sample_min_size": 32, "tile_latent_min_size": 4}  # fmt: skip
"""Tiles of 32 pixels, under the names that one kind of VAE or another has."""


@pytest.mark.parametrize("name", ["QwenImagePipeline", "FluxPipeline-schnell", "WanPipeline"])
def test_what_is_larger_than_a_tile_is_decoded_in_tiles(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    folder = entry.build(tmp_path / "tiny")
    plain, tiled = Model(entry, folder), Model(entry, folder, vae_use_tiling=True, vae_use_slicing=True)
    draft = dataclasses.replace(entry.drafts[0], width=64, height=64, steps=1, seeds=(1,))
    (whole,), (large) = plain.run(draft), tiled.run(draft)[0]
    assert np.array_equal(whole.images[0], large.images[0]), "a tile is larger"
    vae: Any = getattr(tiled.pipeline.vae, "module", tiled.pipeline.vae)
    assert vae.use_tiling
    assert vae.use_slicing
    found = {size: value for size, value in SMALL.items() if hasattr(vae, size)}
    assert found
    for size, value in found.items():
        setattr(vae, size, value)
    small = tiled.run(draft)[0]
    assert small.images[0].shape == whole.images[0].shape
    difference = np.abs(small.images[0].astype(int) - whole.images[0].astype(int))
    assert 0 < difference.mean() < whole.images[0].std()
    assert small.differs_from(whole)[0] == 0


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
