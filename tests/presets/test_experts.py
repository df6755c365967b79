"""A recipe of two files for a model with two experts, as Wan2.2-Lightning is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_grpc import Omni
from omni_grpc.types.media import VideoFormat
from tests.features.suite import Suite, save
from tests.models.cases import ENTRIES

LOCAL: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
SMALL = {"width": 64, "height": 64, "num_frames": 5, "seed": 7, "output_format": VideoFormat.MP4}
LIKE_LIGHTNING: dict[str, Any] = {
    "name": "four",
    "title": "Four steps",
    "fits": {"pipelines": ["WanPipeline"]},
    "sets": {
        "sigmas": [1.0, 0.75, 0.5, 0.25],
        "shift": 5.0,
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "guidance": {"true_cfg_scale": 1.0, "boundary_ratio": 0.875},
        "loras": [{"id": "high", "target": "transformer"}, {"id": "low", "target": "transformer_2"}],
    },
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(ENTRIES["WanPipeline"], tmp_path_factory.mktemp("wan"))


def files(suite: Suite, folder: Path) -> tuple[Path, Path]:
    """One file for each expert, both with the names that either expert has."""
    made = folder / "high.safetensors", folder / "low.safetensors"
    for number, file in enumerate(made):
        tensors = {}
        for name, (down, up) in suite._factors("transformer").items():
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up * (1 - 2 * number)}
        save(tensors, file)
    return made


def test_each_expert_has_its_file_and_its_steps(suite: Suite, tmp_path: Path) -> None:
    presets = tmp_path / "presets.yaml"
    presets.write_text(yaml.safe_dump({"presets": [LIKE_LIGHTNING]}))
    high, low = files(suite, tmp_path)
    settings = {**LOCAL, "presets": str(presets)}
    with Omni(str(suite.folder), **settings, recipe=f"four={high},{low}") as omni:
        made = omni.generate_video("a star", **SMALL)
        again = omni.generate_video("a star", preset="four", **SMALL)
        usual = omni.generate_video("a star", preset="none", steps=4, true_cfg_scale=1.0, **SMALL)
    with Omni(str(suite.folder), **settings, recipe=f"four={low},{high}") as omni:
        swapped = omni.generate_video("a star", **SMALL)
    effective = made.effective
    assert [(lora.lora_id, lora.target) for lora in effective.loras] == [
        ("high", "transformer"),
        ("low", "transformer_2"),
    ]
    assert effective.sigmas == pytest.approx((1.0, 0.9375, 0.8333333, 0.625, 0.0))
    assert (effective.shift, effective.scheduler, effective.steps) == (5.0, "FlowMatchEulerDiscreteScheduler", 4)
    assert (effective.guidance.true_cfg_scale, effective.guidance.boundary_ratio) == (1.0, 0.875)
    assert made.files == again.files
    assert len({made.files[0], usual.files[0], swapped.files[0]}) == 3
    assert usual.effective.scheduler == "UniPCMultistepScheduler"
