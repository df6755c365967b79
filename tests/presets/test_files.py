"""Presets in YAML: each mistake is named by its entry, and those that come with the models fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_grpc.checkpoint.presets import known_presets, shipped_presets
from omni_grpc.checkpoint.registry import specs
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Lora
from omni_grpc.types.request import GuidanceDraft

WHOLE: dict[str, Any] = {
    "name": "house-style",
    "title": "House style",
    "source": "https://example.com/card",
    "fits": {"pipelines": ["QwenImagePipeline"], "config": {"transformer.num_layers": 6}},
    "sets": {
        "sigmas": [1, 0.5],
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "scheduler_config": {"base_shift": 1.5, "shift_terminal": None},
        "guidance": {"true_cfg_scale": 1},
        "loras": [{"id": "house", "scale": 0.5, "target": "transformer", "file": "org/name:a/b.safetensors"}],
    },
}


def write(folder: Path, *presets: Any, text: str = "") -> str:
    file = folder / "presets.yaml"
    file.write_text(text or yaml.safe_dump({"presets": list(presets)}))
    return str(file)


def changed(path: str, value: Any) -> dict[str, Any]:
    """WHOLE with one entry set, or without it (...)."""
    made: dict[str, Any] = yaml.safe_load(yaml.safe_dump(WHOLE))
    *above, name = path.split(".")
    inner = made
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    return made


def test_every_entry_is_read(tmp_path: Path) -> None:
    known = known_presets([write(tmp_path, WHOLE)])
    (made,) = (preset for preset in known if preset.name == "house-style")
    assert (made.title, made.source, made.pipelines) == ("House style", WHOLE["source"], ("QwenImagePipeline",))
    assert (made.steps, made.sigmas, made.shift) == (2, (1.0, 0.5), None)
    assert made.scheduler_config == {"base_shift": 1.5, "shift_terminal": None}
    assert made.guidance == GuidanceDraft(true_cfg_scale=1.0)
    (lora,) = made.loras
    assert (lora.lora, lora.file) == (
        Lora(lora_id="house", scale=0.5, target="transformer"),
        "org/name:a/b.safetensors",
    )
    assert len(known) == len(shipped_presets()) + 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nmae", "x", r"presets\[0\].nmae is unknown; did you mean 'name'\?"),
        ("name", ..., r"presets\[0\].name is missing"),
        ("name", "none", r"presets\[0\].name is 'none', expected at most 64 of a-z"),
        ("name", "Upper", r"presets\[0\].name is 'Upper'"),
        ("name", "flux.1-turbo-alpha", "flux.1-turbo-alpha is the name of another preset already"),
        ("title", 3, r"presets\[0\].title is 3, expected text"),
        ("fits", {}, r"presets\[0\].fits.pipelines is missing"),
        ("fits.pipelines", "QwenImagePipeline", r"fits.pipelines is 'QwenImagePipeline', expected a list of texts"),
        ("sets", [], r"presets\[0\].sets is \[\], expected entries by name"),
        ("sets.steps", 4, r"sets.sigmas has 2 levels, and presets\[0\].sets.steps is 4"),
        ("sets.steps", True, r"sets.steps is True, expected an integer above 0"),
        ("sets.sigmas", [0.5, 1.0], r"sets.sigmas is \[0.5, 1.0\], expected a list of numbers that fall"),
        ("sets.sigmas", [1.0, float("nan")], r"sets.sigmas is \[1.0, nan\]"),
        ("sets.shift", 3.0, r"sets.shift stands for the whole rule, and presets\[0\].sets.scheduler_config is set too"),
        ("sets.scheduler_config.mu", 1, "scheduler_config.mu is unknown; known: shift, flow_shift"),
        ("sets.scheduler_config.base_shift", "1", "scheduler_config.base_shift is '1', expected a number"),
        ("sets.guidance.cfg", 1, "sets.guidance.cfg is unknown"),
        ("sets.guidance.true_cfg_scale", -1, "guidance.true_cfg_scale is -1, expected a number from 0 to 100"),
        ("sets.loras", [{"scale": 1}], r"loras\[0\].id is missing"),
        ("sets.loras", [{"id": "a", "file": "a.bin"}], r"loras\[0\].file is 'a.bin', expected ORG/NAME:FILE"),
        ("sets.loras", [{"id": "a"}, {"id": "a"}], "sets.loras names an adapter twice"),
    ],
)
def test_a_mistake_is_refused_by_its_entry(path: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        known_presets([write(tmp_path, changed(path, value))])
    assert caught.value.reason == "BAD_PRESET"
    assert [violation.field for violation in caught.value.violations] == ["presets"]
    assert str(tmp_path / "presets.yaml") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("presets: [", "is not valid YAML"),
        ("presets: []\npresets: []", "'presets' is given twice"),
        ("- a", r"the file is \['a'\], expected entries by name: presets"),
        ("presets: []", r"presets is \[\], expected a list of presets"),
        ("preset: []", "preset is unknown; did you mean 'presets'"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        known_presets([write(tmp_path, text=text)])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--presets .*none\.yaml: there is no such file"):
        known_presets([str(tmp_path / "none.yaml")])


def test_a_name_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"presets\[1\].name is 'house-style', which another preset of the file has"):
        known_presets([write(tmp_path, WHOLE, WHOLE)])


@pytest.mark.parametrize("preset", shipped_presets(), ids=lambda preset: preset.name)
def test_what_comes_with_the_models_says_where_its_values_are_from(preset: Any) -> None:
    assert preset.source.startswith("https://huggingface.co/")
    assert all(one.file.startswith(preset.source.removeprefix("https://huggingface.co/")) for one in preset.loras)
    assert preset.steps
    assert preset.loras
    native = set(preset.pipelines) & specs().keys()
    assert native or preset.pipelines in (("Flux2Pipeline",), ("QwenImageEditPipeline",))


DEEP = {"num_layers": 40}


@pytest.mark.parametrize(
    ("pipeline", "configs", "names"),
    [
        (
            "WanPipeline",
            {"": {"boundary_ratio": 0.875, "expand_timesteps": False}, "transformer": DEEP, "transformer_2": DEEP},
            ["wan2.2-t2v-lightning-4"],
        ),
        ("WanPipeline", {"": {}, "transformer": DEEP}, ["wan2.1-t2v-lightx2v-4"]),
        ("WanPipeline", {"": {"expand_timesteps": True}, "transformer": DEEP}, []),
        ("WanPipeline", {"": {}, "transformer": {"num_layers": 30}}, []),
        ("WanImageToVideoPipeline", {"": {}, "transformer": DEEP, "transformer_2": DEEP}, ["wan2.2-i2v-lightning-4"]),
        (
            "FluxPipeline",
            {"": {}, "transformer": {"guidance_embeds": True}},
            ["flux.1-turbo-alpha", "hyper-flux.1-dev-16", "hyper-flux.1-dev-8"],
        ),
        ("FluxPipeline", {"": {}, "transformer": {"guidance_embeds": False}}, []),
        (
            "QwenImagePipeline",
            {"": {}, "transformer": {"num_layers": 60}},
            ["qwen-image-lightning-4", "qwen-image-lightning-8"],
        ),
        ("Flux2Pipeline", {}, ["flux.2-dev-turbo"]),
        (
            "QwenImageEditPipeline",
            {"": {}, "transformer": {"num_layers": 60}},
            ["qwen-image-edit-lightning-4", "qwen-image-edit-lightning-8"],
        ),
    ],
)
def test_a_preset_fits_the_members_of_a_family_that_it_was_made_for(
    pipeline: str, configs: Any, names: list[str]
) -> None:
    assert [preset.name for preset in known_presets(()) if preset.fits(pipeline, configs)] == names
