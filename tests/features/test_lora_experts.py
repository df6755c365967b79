"""Adapters of models with two experts: a file and a scale for each, and what a file's name is taken for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_grpc.config import EngineConfig
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.resolve.settings import check_settings
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Adapter, Lora
from tests.features.suite import CACHE, Suite, alone, far, run, save, tea
from tests.models.cases import ENTRIES
from tests.models.model import Model

TOLERANCE = 1e-5
HIGH, LOW = "transformer", "transformer_2"
Changes = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    suite = Suite(ENTRIES["WanPipeline"], tmp_path_factory.mktemp("wan"))
    assert suite.components == (HIGH, LOW)
    return suite


def adapter_file(suite: Suite, folder: Path, file: str, seed: int, prefix: str = "") -> dict[str, Tensor]:
    """Writes a file for layers that both experts have, and returns what it adds to each."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in suite.weights(HIGH).items():
        if name.endswith((".to_q.weight", ".net.2.weight")):
            down = torch.randn(2, weight.shape[1], generator=generator) * weight.std()
            up = torch.randn(weight.shape[0], 2, generator=generator)
            layer = prefix + name.removesuffix(".weight")
            tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            added[name] = up @ down
    folder.mkdir(exist_ok=True)
    save(tensors, folder / file)
    return added


def merged(suite: Suite, folder: Path, changes: Mapping[str, tuple[float, Changes]]) -> Model:
    shutil.copytree(suite.folder, folder)
    for component, (scale, change) in changes.items():
        weights = suite.weights(component)
        save(
            {key: x + scale * change[key] if key in change else x for key, x in weights.items()},
            folder / component / WEIGHT_FILE,
        )
    return Model(suite.entry, folder)


def latents(model: Model, *loras: Lora) -> Tensor:
    return alone(model, model.request(model.draft(steps=4, loras=loras))).latents


def told(model: Model, name: str) -> Adapter:
    return next(adapter for adapter in model.ready.found.loras if adapter.id == name)


def check(suite: Suite, *keys: str) -> None:
    """As a server does at its start."""
    config = EngineConfig.from_settings(model=str(suite.folder), lora=dict.fromkeys(keys, "a.safetensors"))
    check_settings(config, suite.load().checkpoint)


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer."])
def test_each_expert_has_a_file_and_a_scale_of_its_own(prefix: str, suite: Suite, tmp_path: Path) -> None:
    """High 3, low 1.5. Tools write the same name of a component for whichever expert a file is."""
    high = adapter_file(suite, tmp_path, "a.safetensors", 1, prefix)
    low = adapter_file(suite, tmp_path, "b.safetensors", 2, prefix)
    model = suite.load(
        lora={f"fast@{HIGH}": str(tmp_path / "a.safetensors"), f"fast@{LOW}": str(tmp_path / "b.safetensors")}
    )
    loras = Lora(lora_id="fast", scale=3.0, target=HIGH), Lora(lora_id="fast", scale=1.5, target=LOW)
    expected = latents(merged(suite, tmp_path / "both", {HIGH: (3.0, high), LOW: (1.5, low)}))
    assert far(latents(model, *loras), expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
    one = latents(merged(suite, tmp_path / "one", {HIGH: (1.0, high), LOW: (1.0, low)}))
    assert far(latents(model, Lora(lora_id="fast")), one) < TOLERANCE * max(1.0, float(one.abs().max()))
    assert far(one, expected) > 1e-3
    adapter = told(model, "fast")
    assert adapter.applied == {HIGH: 2 * len(high), LOW: 2 * len(low)}
    assert adapter.file == f"a.safetensors ({HIGH}), b.safetensors ({LOW})"
    assert (adapter.skipped, adapter.warnings) == ({}, ())


def test_a_file_said_to_be_for_one_expert_leaves_the_other_alone(suite: Suite, tmp_path: Path) -> None:
    low = adapter_file(suite, tmp_path, "style.safetensors", 3)
    model = suite.load(lora={f"style@{LOW}": str(tmp_path / "style.safetensors")})
    expected = latents(merged(suite, tmp_path / "low", {LOW: (1.0, low)}))
    assert far(latents(model, Lora(lora_id="style")), expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
    assert told(model, "style").targets == (LOW,)


@pytest.mark.parametrize(
    ("name", "applied"),
    [
        ("wan_HIGH_fp16", (HIGH,)),
        ("wan2.2_low_noise_r64", (LOW,)),
        ("WanLowNoise", (LOW,)),
        ("lownoise-4steps", (LOW,)),
        ("yellow_flowers", (HIGH, LOW)),
        ("high_and_low", (HIGH, LOW)),
        ("highlights", (HIGH, LOW)),
    ],
)
def test_the_name_of_a_file_is_a_guess_with_a_warning(
    name: str, applied: tuple[str, ...], suite: Suite, tmp_path: Path
) -> None:
    adapter_file(suite, tmp_path, f"{name}.safetensors", 4)
    adapter = told(suite.load(lora={"a": str(tmp_path / f"{name}.safetensors")}), "a")
    assert set(adapter.targets) == set(applied)
    if len(applied) == 1:
        (warning,) = adapter.warnings
        assert f"by its name it is taken for {applied[0]}. Say so with --lora a@{applied[0]}=PATH" in warning
        assert set(adapter.skipped.values()) == set()
    else:
        assert adapter.warnings == ()


def test_what_the_file_or_the_operator_says_counts_before_its_name(suite: Suite, tmp_path: Path) -> None:
    adapter_file(suite, tmp_path, "low_noise.safetensors", 5)
    adapter_file(suite, tmp_path, "low.safetensors", 5, "transformer_2.")
    paths = {f"both@{HIGH}": "low_noise", f"both@{LOW}": "low_noise", "own": "low"}
    model = suite.load(lora={name: str(tmp_path / f"{file}.safetensors") for name, file in paths.items()})
    assert told(model, "both").targets == (HIGH, LOW)
    assert told(model, "own").targets == (LOW,)
    assert told(model, "both").warnings == told(model, "own").warnings == ()


def test_a_model_with_one_denoiser_guesses_nothing(tmp_path: Path) -> None:
    suite = Suite(ENTRIES["WanPipeline-ti2v"], tmp_path)
    adapter_file(suite, tmp_path / "files", "low_noise.safetensors", 6)
    adapter = told(suite.load(lora={"a": str(tmp_path / "files" / "low_noise.safetensors")}), "a")
    assert (adapter.targets, adapter.warnings) == ((HIGH,), ())
    with pytest.raises(ConfigError, match=r"has a@transformer_2; the components of .* are transformer, text_encoder"):
        check(suite, "a@transformer_2")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("a@vae",), "has a@vae; the components of tiny are transformer, transformer_2, text_encoder"),
        (("@transformer",), "has a file for transformer without a name; write NAME@transformer"),
        (("a", "a@transformer_2"), r"has a@transformer_2, and a for all .* \(a@transformer, a@transformer_2\)"),
    ],
)
def test_what_no_component_can_mean_is_refused(keys: tuple[str, ...], message: str, suite: Suite) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(suite, *keys)
    assert [violation.field for violation in caught.value.violations] == ["lora"]


def test_the_step_cache_of_each_expert_knows_its_scale(suite: Suite, tmp_path: Path) -> None:
    """Two requests that differ in the scale of one expert alone, with a cache that never answers and with one that
    does: each is what it is alone.
    """
    adapter_file(suite, tmp_path, "a.safetensors", 7)
    model = suite.load(CACHE, lora={"a": str(tmp_path / "a.safetensors")})
    cases = [
        (Lora(lora_id="a", target=HIGH), Lora(lora_id="a", scale=1.5, target=LOW)),
        (Lora(lora_id="a", target=HIGH), Lora(lora_id="a", scale=0.5, target=LOW)),
        (Lora(lora_id="a", scale=0.5, target=HIGH), Lora(lora_id="a", scale=0.5, target=LOW)),
    ]
    for threshold in (0.0, 10.0):
        cache = tea(threshold)
        requests = [
            model.request(model.draft(steps=6, loras=loras, cache=cache), f"job{n}") for n, loras in enumerate(cases)
        ]
        together = run(model, *((0, request) for request in requests))
        for request in requests:
            expected = alone(model, request)
            assert together[request.id].answered == expected.answered
            assert far(together[request.id].latents, expected.latents) < TOLERANCE * max(
                1.0, float(expected.latents.abs().max())
            )
        assert bool(sum(expected.answered)) is bool(threshold)
        assert far(together["job0"].latents, together["job1"].latents) > 1e-4
        assert far(together["job1"].latents, together["job2"].latents) > 1e-4
