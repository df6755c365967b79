"""From `--recipe`, `--presets` and a request's preset to the picture, the reply and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.cli.main import main
from omni_grpc.config import EngineConfig
from omni_grpc.metadata import parameters_in
from omni_grpc.resolve.recipes import with_presets
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import AppliedLora
from omni_grpc.types.media import ImageFormat
from tests.features.suite import FIRST, SECOND, Suite
from tests.models.cases import ENTRIES

SMALL = {"width": 32, "height": 32, "seed": 7, "output_format": ImageFormat.RAW_RGB8}
LOCAL: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
FAST: dict[str, Any] = {
    "name": "fast",
    "title": "Fast",
    "fits": {"pipelines": ["QwenImagePipeline"]},
    "sets": {
        "sigmas": [1.0, 0.75, 0.5],
        "scheduler_config": {"use_dynamic_shifting": True, "base_shift": 1.5, "max_shift": 1.5, "shift_terminal": None},
        "guidance": {"true_cfg_scale": 1.0},
        "loras": [{"id": "quick", "scale": 0.5}],
    },
}
PAIR: dict[str, Any] = {
    "name": "pair",
    "title": "Two adapters",
    "fits": {"pipelines": ["QwenImagePipeline"]},
    "sets": {"loras": [{"id": "one", "file": "org/name:one.safetensors"}, {"id": "two"}]},
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(ENTRIES["QwenImagePipeline"], tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def presets(suite: Suite) -> str:
    file = suite.folder.parent / "presets.yaml"
    file.write_text(yaml.safe_dump({"presets": [FAST, PAIR]}))
    return str(file)


def visited() -> list[float]:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5], mu=1.5)
    return [float(level) for level in scheduler.sigmas]


def test_a_recipe_brings_its_adapter_and_is_what_requests_get(suite: Suite, presets: str) -> None:
    recipe = f"fast={suite.adapters[FIRST]}"
    with Omni(
        str(suite.folder), **LOCAL, presets=presets, recipe=recipe, lora={"style": str(suite.adapters[SECOND])}
    ) as omni:
        made = omni.generate("a star", negative_prompt="blurry", **SMALL)
        styled = omni.generate("a star", loras={"style": 1.0}, **SMALL)
        spelled = omni.generate(
            "a star", preset="none", sigmas=(1.0, 0.75, 0.5), shift=float(np.exp(1.5)), loras={"quick": 0.5}, **SMALL
        )
        usual = omni.generate("a star", preset="none", steps=3, **SMALL)
        other = omni.generate("a star", steps=4, true_cfg_scale=3.0, negative_prompt="", **SMALL)
    effective = made.effective
    assert (effective.preset, effective.steps, effective.scheduler) == ("fast", 3, "FlowMatchEulerDiscreteScheduler")
    assert list(effective.sigmas) == visited()
    assert effective.shift == pytest.approx(np.exp(1.5))
    assert effective.guidance.true_cfg_scale == 1.0
    assert [(lora.lora_id, lora.scale) for lora in effective.loras] == [("quick", 0.5)]
    assert isinstance(effective.loras[0], AppliedLora)
    assert effective.defaults_used["sampling.preset"] == "fast"
    assert [warning.code for warning in made.warnings] == ["NEGATIVE_PROMPT_WITHOUT_EFFECT"]
    assert [(lora.lora_id, lora.scale) for lora in styled.effective.loras] == [("style", 1.0), ("quick", 0.5)]
    pixels = [np.frombuffer(one.files[0], np.uint8).astype(int) for one in (made, spelled, usual, styled)]
    assert np.abs(pixels[0] - pixels[1]).max() <= 1, "the same levels, but for the rounding of the shift"
    assert all(np.abs(pixels[0] - one).max() > 2 for one in pixels[2:])
    assert (usual.effective.preset, usual.effective.loras, len(usual.effective.sigmas)) == ("", (), 4)
    assert [(warning.code, warning.field) for warning in other.warnings] == [
        ("PRESET_OVERRIDDEN", "sampling.steps"),
        ("PRESET_OVERRIDDEN", "sampling.guidance.true_cfg_scale"),
    ]
    assert (other.effective.steps, other.effective.guidance.true_cfg_scale) == (4, 3.0)


def test_a_file_says_its_preset_and_is_made_again_by_it(
    suite: Suite, presets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    server = ("--model", suite.folder, "--device", "cpu", "--cpu-threads", 1, "--presets", presets)
    server += ("--lora", f"quick={suite.adapters[FIRST]}", "--quiet")
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    size = ("--width", 32, "--height", 32, "--seed", 3)
    run("generate", "a star", "--preset", "fast", *size, "--out", first, *server)
    found = parameters_in(first)
    assert found.asked.options["preset"] == "fast"
    assert (found.effective["preset"], found.effective["steps"]) == ("fast", 3)
    assert found.effective["sigmas"] == visited()
    shown = run("show", first)
    assert "preset" in shown
    assert "effective sigmas" in shown
    run("generate", "--like", first, "--out", second, *server)
    assert PIL.Image.open(first).tobytes() == PIL.Image.open(second).tobytes()
    assert parameters_in(second).effective["sigmas"] == visited()
    capsys.readouterr()
    assert main([str(word) for word in ("generate", "--like", first, "--steps", 2, "--out", second, *server)]) == 0
    told = capsys.readouterr().err
    assert "preset fast sets it to 3" in told
    assert "sigmas was" not in told
    made = run("generate", "a star", "--sigmas", "1,0.4", "--shift", 2, *size, "--out", second, *server[:-1], "--json")
    assert json.loads(made)["effective"]["sigmas"] == pytest.approx([1.0, 2 * 0.4 / 1.4, 0.0])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fats", r"'fats' is no preset; did you mean 'fast'\?; for tiny there is fast, pair"),
        ("flux.1-turbo-alpha", "flux.1-turbo-alpha is for FluxPipeline, transformer.guidance_embeds True, which tiny"),
        ("fast", "fast needs the adapter quick, and says no file of the hub for it; give its file: fast=FILE1"),
        ("fast=a,b", "fast is given 2 files, and it has 1: quick"),
        ("fast=none.safetensors", "'none.safetensors' is neither a file or folder nor ORG/NAME:FILE on the hub"),
        ("pair", "pair needs the adapter two, and says no file of the hub for it"),
    ],
)
def test_a_recipe_that_cannot_be_had_stops_the_start(recipe: str, message: str, suite: Suite, presets: str) -> None:
    config = EngineConfig.from_settings(model=str(suite.folder), presets=presets, recipe=recipe)
    with pytest.raises(ConfigError, match=message) as caught:
        with_presets(config, open_checkpoint(suite.folder, name="tiny"))
    assert (caught.value.reason, [fault.field for fault in caught.value.violations]) == ("BAD_RECIPE", ["recipe"])


def test_adapters_of_a_recipe_are_where_it_says_or_loaded_by_name(suite: Suite, presets: str) -> None:
    def loras(recipe: str, **lora: str) -> dict[str, str]:
        config = EngineConfig.from_settings(model=str(suite.folder), presets=presets, recipe=recipe, lora=lora or None)
        return dict(with_presets(config, open_checkpoint(suite.folder, name="tiny")).recipe_loras)

    first, second = (str(suite.adapters[name]) for name in (FIRST, SECOND))
    assert loras(f"pair={first},{second}") == {"one": first, "two": second}
    assert loras("pair", two=second) == {"one": "org/name:one.safetensors"}
    assert loras("fast", quick=first) == {}
    with pytest.raises(ConfigError, match="is given a file for quick, which --lora loads too"):
        loras(f"fast={first}", quick=first)
