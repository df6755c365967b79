"""Files of LoRA adapters: the layouts they come in, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.loading.adapters import read_adapter
from omni_grpc.types.errors import ConfigError

DOWN, UP = torch.arange(8.0).view(2, 4), torch.arange(6.0).view(3, 2)
LAYER = "blocks.0.attn.to_q"


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    safetensors.torch.save_file({key: x.clone() for key, x in tensors.items()}, path, metadata)
    return path


@pytest.mark.parametrize(
    ("down", "up", "kind"),
    [
        (f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight", "peft"),
        (f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight", "peft"),
        (f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight", "peft"),
        (f"diffusion_model.{LAYER}.lora_A.weight", f"diffusion_model.{LAYER}.lora_B.weight", "peft"),
        (f"{LAYER}.lora.down.weight", f"{LAYER}.lora.up.weight", "diffusers"),
        (f"{LAYER}_lora.down.weight", f"{LAYER}_lora.up.weight", "diffusers"),
        (f"{LAYER}.lora_down.weight", f"{LAYER}.lora_up.weight", "diffusers"),
    ],
)
def test_a_layer_is_found_however_its_factors_are_named(down: str, up: str, kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", {down: DOWN.half(), up: UP.half(), "other": torch.zeros(1)})
    found = read_adapter("a", file)
    assert (found.format, found.rank, found.keys) == (kind, 2, tuple(sorted((down, up, "other"))))
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found.size_bytes == file.stat().st_size
    factors = found.layers[LAYER]
    assert torch.equal(factors.down, DOWN)
    assert torch.equal(factors.up, UP)
    assert factors.scale == 1.0
    assert set(factors.keys) == {down, up}


def test_names_may_begin_with_a_component(tmp_path: Path) -> None:
    pairs = {
        f"{prefix}{LAYER}.lora_{side}.weight": factor + number
        for number, prefix in enumerate(("transformer.", "transformer_2.", "", "text_encoder."))
        for side, factor in (("A", DOWN), ("B", UP))
    }
    found = read_adapter("a", write(tmp_path / "a.safetensors", pairs))
    components = frozenset({"transformer", "transformer_2"})
    assert found.of("transformer", components).keys() == {LAYER, f"text_encoder.{LAYER}"}
    only = read_adapter("a", write(tmp_path / "b.safetensors", dict(list(pairs.items())[:4])))
    for number, component in enumerate(("transformer", "transformer_2")):
        assert torch.equal(only.of(component, components)[LAYER].down, DOWN + number)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 1.0),
        ({"lora_alpha": 8, "r": 2}, 4.0),
        ({"lora_alpha": 8, "r": 2, "use_rslora": True}, 8 / 2**0.5),
        ({"transformer.lora_alpha": 8, "transformer.r": 2}, 4.0),
    ],
)
def test_alpha_comes_from_the_config_beside_or_in_the_header(
    config: dict[str, object], expected: float, tmp_path: Path
) -> None:
    pair = {f"{LAYER}.lora_A.weight": DOWN, f"{LAYER}.lora_B.weight": UP}
    header = write(tmp_path / "a.safetensors", pair, {"lora_adapter_metadata": json.dumps(config)})
    assert read_adapter("a", header).layers[LAYER].scale == pytest.approx(expected)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "adapter_model.safetensors", pair)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter("a", folder).layers[LAYER].scale == pytest.approx(expected)


def test_alpha_of_a_layer_wins_and_its_key_is_used(tmp_path: Path) -> None:
    pair = {f"{LAYER}.lora_down.weight": DOWN, f"{LAYER}.lora_up.weight": UP, f"{LAYER}.alpha": torch.tensor(6.0)}
    found = read_adapter("a", write(tmp_path / "a.safetensors", pair, {"lora_adapter_metadata": '{"lora_alpha": 1}'}))
    assert found.layers[LAYER].scale == 3.0
    assert set(found.layers[LAYER].keys) == set(pair)


PAIR = {f"{LAYER}.lora_A.weight": DOWN, f"{LAYER}.lora_B.weight": UP}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"x.weight": DOWN}, None, "has no LoRA layers; it begins with x.weight"),
        ({f"{LAYER}.lora_A.weight": DOWN}, None, f"{LAYER} has one factor of two"),
        ({**PAIR, f"{LAYER}.lora_B.weight": UP[:, :1].contiguous()}, None, "have no product"),
        ({**PAIR, f"{LAYER}.lora_magnitude_vector": UP}, None, "more than LoRA, which is not served yet"),
        ({**PAIR, f"{LAYER}.lora_B.bias": UP}, None, "more than LoRA"),
        ({**PAIR, f"{LAYER}.dora_scale": UP}, None, "more than LoRA"),
        ({"a.hada_w1_a": UP}, None, "more than LoRA"),
        (PAIR, '{"use_dora": true}', "use_dora"),
        (PAIR, '{"alpha_pattern": {"to_q": 3}}', "alpha_pattern"),
        (PAIR, "{", "its config is not JSON"),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_name(
    tensors: dict[str, Tensor], metadata: str | None, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.safetensors", tensors, metadata and {"lora_adapter_metadata": metadata})
    with pytest.raises(ConfigError, match=message) as caught:
        read_adapter("style", file)
    assert str(caught.value).startswith("--lora style: ")
    assert caught.value.reason == "BAD_LORA"
    assert [violation.field for violation in caught.value.violations] == ["lora"]


def test_a_convolution_is_left_out_and_its_keys_are_not_used(tmp_path: Path) -> None:
    conv = {"conv.lora_A.weight": torch.zeros(2, 4, 3, 3), "conv.lora_B.weight": torch.zeros(3, 2, 1, 1)}
    found = read_adapter("a", write(tmp_path / "a.safetensors", PAIR | conv))
    assert found.layers.keys() == {LAYER}
    assert set(conv) <= set(found.keys)


def test_a_file_that_is_not_there_or_not_safe_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="neither a file nor a folder with one of"):
            read_adapter("a", path)
    pickled = tmp_path / "adapter.bin"
    torch.save(PAIR, pickled)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_adapter("a", pickled)


def test_a_config_in_the_folder_is_for_its_own_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = write(tmp_path / "mine.safetensors", PAIR)
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 32}')
    # renamed, and alone with its config
    assert read_adapter("a", mine).layers[LAYER].scale == 16.0
    assert not caplog.messages
    other = write(tmp_path / "other.safetensors", PAIR)
    assert read_adapter("a", mine).layers[LAYER].scale == 1.0
    other.rename(tmp_path / "adapter_model.safetensors")
    assert read_adapter("a", mine).layers[LAYER].scale == 1.0
    assert "adapter_config.json is not of mine.safetensors and is not used" in caplog.text
    assert read_adapter("a", tmp_path).layers[LAYER].scale == 16.0


def test_each_component_has_the_config_of_its_own(tmp_path: Path) -> None:
    config = {"transformer.lora_alpha": 2, "text_encoder.lora_alpha": 32}
    pairs = {f"{name}.{key}": x for name in ("transformer", "text_encoder") for key, x in PAIR.items()}
    metadata = {"lora_adapter_metadata": json.dumps(config)}
    layers = read_adapter("a", write(tmp_path / "a.safetensors", pairs, metadata)).layers
    assert {name: factors.scale for name, factors in layers.items()} == {
        f"transformer.{LAYER}": 1.0,
        f"text_encoder.{LAYER}": 16.0,
    }
    with pytest.raises(ConfigError, match="names no component, and lora_alpha differs") as caught:
        read_adapter("a", write(tmp_path / "b.safetensors", PAIR, metadata))
    assert caught.value.reason == "BAD_LORA"


ALPHA = f"{LAYER}.alpha"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({ALPHA: torch.tensor([1.0, 2.0])}, "{}", f"{ALPHA} has 2 values"),
        ({ALPHA: torch.zeros(0)}, "{}", f"{ALPHA} has 0 values"),
        ({ALPHA: torch.tensor(torch.nan)}, "{}", f"{ALPHA} has values that are not finite"),
        ({f"{LAYER}.lora_A.weight": DOWN / 0}, "{}", f"{LAYER}.lora_A.weight has values that are not finite"),
        ({f"{LAYER}.lora_B.weight": UP * torch.nan}, "{}", f"{LAYER}.lora_B.weight has values that are not finite"),
        ({f"{LAYER}.lora_A.weight": DOWN[:0], f"{LAYER}.lora_B.weight": UP[:, :0].contiguous()}, "{}", "no product"),
        ({f"{LAYER}.lora_A.weight": torch.tensor(1.0)}, "{}", "no product"),
        ({}, '{"lora_alpha": NaN}', "lora_alpha in the header of .* is nan; it must be a finite number"),
        ({}, '{"lora_alpha": [1, 2]}', "lora_alpha in the header of .* must be a finite number"),
        ({}, "[]", "its config is not a JSON object"),
    ],
)
def test_scales_and_factors_that_are_no_numbers_are_refused_by_their_key(
    tensors: dict[str, Tensor], config: str, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.safetensors", PAIR | tensors, {"lora_adapter_metadata": config})
    with pytest.raises(ConfigError, match=message) as caught:
        read_adapter("style", file)
    assert str(caught.value).startswith("--lora style: ")
    assert caught.value.reason == "BAD_LORA"
