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
from omni_grpc.loading.adapters.binding import Change, bind
from omni_grpc.loading.adapters.deltas import Bias, LowRank, Vector
from omni_grpc.loading.adapters.transforms import Loha
from omni_grpc.types.errors import ConfigError

DOWN, UP = torch.arange(8.0).view(2, 4), torch.arange(6.0).view(3, 2)
LAYER = "blocks.0.attn.to_q"
FLAT = LAYER.replace(".", "_")


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    safetensors.torch.save_file({key: x.clone() for key, x in tensors.items()}, path, metadata)
    return path


NORM, TABLE = "blocks.0.attn.norm_q", "blocks.0.scale_shift_table"
LAYERS = {LAYER: (3, 4), NORM: (2,), TABLE: (1, 6, 2), "blocks.0.conv": None}
COMPONENTS = ("transformer", "transformer_2")


def changes(path: Path, component: str = "transformer") -> tuple[Change, ...]:
    """What a file changes of a component that has a linear layer, a norm, a table and a convolution."""
    file = read_adapter("style", path)
    bound = bind("style", file, component, LAYERS, components=COMPONENTS)
    bound.check("style")
    return bound.changes


def scale(path: Path) -> float:
    (change,) = changes(path)
    return change.scale


@pytest.mark.parametrize(
    ("down", "up", "kind"),
    [
        (f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight", "peft"),
        (f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight", "peft"),
        (f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight", "peft"),
        (f"{LAYER}.lora_A.my-style.weight", f"{LAYER}.lora_B.my-style.weight", "peft"),
        (f"diffusion_model.{LAYER}.lora_A.weight", f"diffusion_model.{LAYER}.lora_B.weight", "comfyui"),
        (f"lora_unet_{FLAT}.lora_down.weight", f"lora_unet_{FLAT}.lora_up.weight", "kohya"),
        (f"lora_unet__{FLAT}.lora_down.weight", f"lora_unet__{FLAT}.lora_up.weight", "kohya"),
        (f"lora_transformer_{FLAT}.lora_down.weight", f"lora_transformer_{FLAT}.lora_up.weight", "onetrainer"),
        (f"lycoris_{FLAT}.lora_down.weight", f"lycoris_{FLAT}.lora_up.weight", "lycoris"),
        ("blocks_0.attn_to_q.lora_down.weight", "blocks_0.attn_to_q.lora_up.weight", "diffusers"),
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
    (change,) = changes(file)
    assert isinstance(change.delta, LowRank)
    assert torch.equal(change.delta.down, DOWN)
    assert torch.equal(change.delta.up, UP)
    assert change.scale == 1.0
    assert set(change.keys) == {down, up}


def test_names_may_begin_with_a_component(tmp_path: Path) -> None:
    pairs = {
        f"{prefix}{LAYER}.lora_{side}.weight": factor + number
        for number, prefix in enumerate(("transformer.", "transformer_2.", "", "text_encoder."))
        for side, factor in (("A", DOWN), ("B", UP))
    }
    path = write(tmp_path / "a.safetensors", pairs)
    with pytest.raises(ConfigError, match=rf"{LAYER} and transformer.{LAYER} are the same layer"):
        changes(path)
    only = write(tmp_path / "b.safetensors", dict(list(pairs.items())[:4]))
    for number, component in enumerate(COMPONENTS):
        (change,) = changes(only, component)
        assert isinstance(change.delta, LowRank)
        assert torch.equal(change.delta.down, DOWN + number)
    plain = write(tmp_path / "c.safetensors", dict(list(pairs.items())[4:]))
    found = bind("a", read_adapter("a", plain), "transformer_2", {LAYER: (3, 4)}, components=COMPONENTS)
    assert len(found.changes) == 1
    assert found.skipped == dict.fromkeys([f"text_encoder.{LAYER}.lora_{side}.weight" for side in "AB"], "text encoder")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 1.0),
        ({"lora_alpha": 8, "r": 2}, 4.0),
        ({"lora_alpha": 8, "r": 2, "use_rslora": True}, 8 / 2**0.5),
        ({"transformer.lora_alpha": 8, "transformer.r": 2}, 4.0),
        ({"lora_alpha": 1, "alpha_pattern": {"to_q": 8}}, 4.0),
        ({"lora_alpha": 1, "alpha_pattern": {r"blocks\.\d+\.attn\.to_q": 8, "to_q": 6}}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"o_q": 1, "to_k": 1, "attn": 1}}, 4.0),
        ({"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"to_q": 4}}, 4 / 2**0.5),
        ({"lora_alpha": 8, "r": 64, "rank_pattern": {"to_q": 32}}, 4.0),
    ],
)
def test_alpha_comes_from_the_config_beside_or_in_the_header(
    config: dict[str, object], expected: float, tmp_path: Path
) -> None:
    pair = {f"{LAYER}.lora_A.weight": DOWN, f"{LAYER}.lora_B.weight": UP}
    header = write(tmp_path / "a.safetensors", pair, {"lora_adapter_metadata": json.dumps(config)})
    assert scale(header) == pytest.approx(expected)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "adapter_model.safetensors", pair)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert scale(folder) == pytest.approx(expected)


def test_alpha_of_a_layer_wins_and_its_key_is_used(tmp_path: Path) -> None:
    pair = {f"{LAYER}.lora_down.weight": DOWN, f"{LAYER}.lora_up.weight": UP, f"{LAYER}.alpha": torch.tensor(6.0)}
    path = write(tmp_path / "a.safetensors", pair, {"lora_adapter_metadata": '{"lora_alpha": 1, "use_rslora": true}'})
    (change,) = changes(path)
    assert change.scale == 3.0
    assert set(change.keys) == set(pair)


def test_an_alpha_of_zero_is_the_rank_and_a_scalar_multiplies(tmp_path: Path) -> None:
    pair = {f"{LAYER}.lora_down.weight": DOWN, f"{LAYER}.lora_up.weight": UP, f"{LAYER}.alpha": torch.tensor(0.0)}
    assert scale(write(tmp_path / "a.safetensors", pair)) == 1.0
    assert scale(write(tmp_path / "b.safetensors", pair | {f"{LAYER}.scalar": torch.tensor([0.5])})) == 0.5


def loha(rank: int) -> dict[str, Tensor]:
    shapes = {"w1_a": (3, rank), "w1_b": (rank, 4), "w2_a": (3, rank), "w2_b": (rank, 4)}
    generator = torch.Generator().manual_seed(3)
    return {part: torch.randn(shape, generator=generator) for part, shape in shapes.items()}


def wide_loha() -> dict[str, Tensor]:
    """Two products of unlike shapes."""
    return {**loha(17), "w2_b": torch.ones(17, 5)}


PAIR = {f"{LAYER}.lora_A.weight": DOWN, f"{LAYER}.lora_B.weight": UP}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"x.weight": DOWN}, None, "has no LoRA layers; it begins with x.weight"),
        ({f"{LAYER}.lora_A.weight": DOWN}, None, f"{LAYER} has one factor of two"),
        ({**PAIR, f"{LAYER}.lora_B.weight": UP[:, :1].contiguous()}, None, "have no product"),
        ({**PAIR, f"{LAYER}.lora_magnitude_vector": UP}, None, r"vector is \(3, 2\); a weight \(3, 4\) has 3 outputs"),
        ({**PAIR, f"{LAYER}.dora_scale": torch.zeros(1, 3)}, None, r"dora_scale is \(1, 3\); a weight"),
        ({f"{LAYER}.oft_blocks": UP}, None, r"oft_blocks is \(3, 2\), no blocks of 3 channels"),
        ({f"{LAYER}.oft_blocks": torch.ones(1, 3, 3), f"{LAYER}.rescale": UP}, None, "rescale has 6 values"),
        ({f"{LAYER}.rescale": UP[:, :1].contiguous()}, None, "and no blocks to rotate by"),
        ({f"{LAYER}.oft_R.default.weight": UP}, None, r"is \(3, 2\), which are no blocks of 4 inputs"),
        ({f"{LAYER}.oft_diag": UP}, None, "oft_diag is of an older OFT"),
        ({f"{LAYER}.boft_R": UP}, None, r"boft_R is \(3, 2\), no blocks of 4 channels"),
        ({f"{LAYER}.boft_R": torch.ones(3, 2, 2, 2)}, None, "stages of boft_R with blocks of 2 do not fit 4 inputs"),
        ({f"{LAYER}.oft_blocks": torch.ones(2, 3, 1, 1)}, None, "2 stages of blocks of 1 do not fit 3 outputs"),
        (
            {f"{LAYER}.{part}.weight": UP for part in ("a1", "a2", "b1", "b2")},
            None,
            "a1, a2, b1 and b2 have no products",
        ),
        ({f"{LAYER}.a1.weight": UP, f"{LAYER}.dora_scale": UP}, None, "dora_scale rescales what is no sum"),
        ({f"{LAYER}.set_weight": UP}, None, r"changes a weight \(3, 2\), the model's is \(3, 4\)"),
        ({**PAIR, f"{LAYER}.reshape_weight": torch.tensor([3, 8])}, None, "reshape_weight gives a layer more inputs"),
        ({"transformer.blocks.0.diff_m": UP}, None, r"scale_shift_table changes \(3, 2\), the model's is \(1, 6, 2\)"),
        ({f"{NORM}.diff": UP[:, 0]}, None, r"norm_q changes \(3,\), the model's is \(2,\)"),
        ({f"{NORM}.oft_blocks": torch.ones(1, 2, 2)}, None, "oft_blocks is not a change that a norm can have"),
        ({"blocks.0.conv.diff": UP[0]}, None, "blocks.0.conv is neither a linear layer nor a norm"),
        ({**PAIR, f"{LAYER}.lora_A.two.weight": DOWN}, None, "which are the same; keep one adapter in a file"),
        ({**PAIR, f"lora_unet_{FLAT}.lora_down.weight": DOWN}, None, "are the same layer"),
        ({f"{LAYER}.lora_B.bias": UP[:, 0]}, None, "is of a factor that is not there"),
        ({f"{LAYER}.hada_w1_a": UP}, None, "has one factor of two, and no hada_w1_b"),
        ({f"{LAYER}.hada_{part}": x for part, x in wide_loha().items()}, None, "are not of one shape"),
        ({f"{LAYER}.diff": UP}, None, r"changes a weight \(3, 2\), the model's is \(3, 4\)"),
        ({f"{LAYER}.diff_b": UP[0]}, None, r"changes a weight \(2,\), the model's is \(3,\)"),
        (PAIR, '{"alpha_pattern": {"to_q": "3"}}', "alpha_pattern in .* must be a finite number"),
        (PAIR, '{"alpha_pattern": [3]}', "alpha_pattern in .* must be an object"),
        (PAIR, '{"alpha_pattern": {"(": 3}}', "which is no regular expression"),
        (PAIR, "{", "its config is not JSON"),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_name(
    tensors: dict[str, Tensor], metadata: str | None, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.safetensors", tensors, metadata and {"lora_adapter_metadata": metadata})
    with pytest.raises(ConfigError, match=message) as caught:
        changes(file)
    assert str(caught.value).startswith("--lora style: ")
    assert caught.value.reason == "BAD_LORA"
    assert [violation.field for violation in caught.value.violations] == ["lora"]


def test_norms_and_tables_are_changed_by_parameter(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -2.0])
    tensors = {
        f"{NORM}.w_norm": values,
        f"diffusion_model.{NORM}.diff_b": values * 2,
        "diffusion_model.blocks.0.diff_m": torch.arange(12.0).view(1, 6, 2),
    }
    found = {}
    for key, tensor in tensors.items():
        (change,) = changes(write(tmp_path / "a.safetensors", {key: tensor}))
        assert isinstance(change.delta, Vector)
        found[change.parts[0].module, change.delta.leaf] = change.delta.values
    expected = {
        (NORM, "weight"): values,
        (NORM, "bias"): values * 2,
        (TABLE, TABLE.rpartition(".")[2]): torch.arange(12),
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].flatten(), tensor.float())


def test_the_modulation_of_a_block_that_has_no_table_is_told(tmp_path: Path) -> None:
    file = read_adapter(
        "a", write(tmp_path / "a.safetensors", PAIR | {"blocks.0.diff_m": UP, "blocks.1.diff_m": UP * 0})
    )
    bound = bind("a", file, "transformer", {LAYER: (3, 4)})
    assert bound.skipped == {"blocks.0.diff_m": "no such layer in the model", "blocks.1.diff_m": "zero"}


def test_a_loha_of_high_rank_is_kept_as_its_factors(tmp_path: Path) -> None:
    """Up to rank 16 it is a LoRA, above that a LoRA would be larger than the weight."""
    for rank, kind in ((16, LowRank), (17, Loha)):
        parts = loha(rank)
        file = write(tmp_path / "a.safetensors", {f"{LAYER}.hada_{part}": x for part, x in parts.items()})
        (change,) = changes(file)
        assert isinstance(change.delta, kind)
        assert not isinstance(change.delta, Bias)
        expected = (parts["w1_a"] @ parts["w1_b"]) * (parts["w2_a"] @ parts["w2_b"])
        torch.testing.assert_close(change.delta.dense(), expected)


def test_a_convolution_is_left_out_and_its_keys_are_not_used(tmp_path: Path) -> None:
    conv = {"conv.lora_A.weight": torch.ones(2, 4, 3, 3), "conv.lora_B.weight": torch.ones(3, 2, 1, 1)}
    found = read_adapter("a", write(tmp_path / "a.safetensors", PAIR | conv))
    bound = bind("a", found, "transformer", {LAYER: (3, 4), "conv": None})
    assert [change.layer for change in bound.changes] == [LAYER]
    assert bound.skipped == dict.fromkeys(conv, "not a linear layer of the model")


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
    assert scale(mine) == 16.0
    assert not caplog.messages
    other = write(tmp_path / "other.safetensors", PAIR)
    assert scale(mine) == 1.0
    other.rename(tmp_path / "adapter_model.safetensors")
    assert scale(mine) == 1.0
    assert "adapter_config.json is not of mine.safetensors and is not used" in caplog.text
    assert scale(tmp_path) == 16.0


def test_each_component_has_the_config_of_its_own(tmp_path: Path) -> None:
    config = {"transformer.lora_alpha": 2, "text_encoder.lora_alpha": 32}
    pairs = {f"{name}.{key}": x for name in ("transformer", "text_encoder") for key, x in PAIR.items()}
    metadata = {"lora_adapter_metadata": json.dumps(config)}
    assert scale(write(tmp_path / "a.safetensors", pairs, metadata)) == 1.0
    with pytest.raises(ConfigError, match="names no component, and lora_alpha differs") as caught:
        scale(write(tmp_path / "b.safetensors", PAIR, metadata))
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
        changes(file)
    assert str(caught.value).startswith("--lora style: ")
    assert caught.value.reason == "BAD_LORA"


def test_keys_of_zeros_change_nothing_whatever_their_kind(tmp_path: Path) -> None:
    """But for those that replace something, as the magnitudes of DoRA do."""
    zeros = {
        f"{LAYER}.oft_blocks": UP * 0,
        f"{NORM}.diff": DOWN[0] * 0,
        f"{NORM}.diff_b": DOWN[0] * 0,
        "blocks.0.diff_m": UP * 0,
        f"{LAYER}.diff_b": UP[:, 0] * 0,
        "blocks.1.attn.to_q.diff": DOWN,
    }
    file = read_adapter("style", write(tmp_path / "a.safetensors", zeros))
    bound = bind("style", file, "transformer", {LAYER: (3, 4), NORM: (4,), "blocks.1.attn.to_q": (2, 4)})
    assert bound.refusals == {}
    assert [change.layer for change in bound.changes] == ["blocks.1.attn.to_q"]
    assert bound.skipped == dict.fromkeys(list(zeros)[:-1], "zero")


def test_a_lokr_is_scaled_by_the_rank_of_what_is_decomposed(tmp_path: Path) -> None:
    """The second factor's where both are; PEFT scales whole ones by its config, others not at all."""
    first = {"w1_a": torch.randn(3, 5), "w1_b": torch.randn(5, 2), "w2_a": torch.randn(1, 4), "w2_b": torch.randn(4, 2)}
    both = {f"{LAYER}.lokr_{part}": tensor for part, tensor in first.items()} | {ALPHA: torch.tensor(2.0)}
    (change,) = changes(write(tmp_path / "a.safetensors", both))
    expected = torch.kron(first["w1_a"] @ first["w1_b"], first["w2_a"] @ first["w2_b"])
    assert not isinstance(change.delta, Bias)
    torch.testing.assert_close(change.scale * change.delta.dense(), 0.5 * expected)
    whole = {f"{LAYER}.lokr_w1": torch.randn(3, 2), f"{LAYER}.lokr_w2": torch.randn(1, 2)}
    assert scale(write(tmp_path / "b.safetensors", whole | {ALPHA: torch.tensor(1e9)})) == 1.0
    peft = {"lora_adapter_metadata": '{"peft_type": "LOKR", "alpha": 2, "r": 8}'}
    assert scale(write(tmp_path / "c.safetensors", whole, peft)) == 0.25


def test_a_convolution_of_patches_is_a_linear_layer(tmp_path: Path) -> None:
    conv = {f"{LAYER}.lora_A.weight": DOWN.view(2, 1, 2, 2), f"{LAYER}.lora_B.weight": UP.view(3, 2, 1, 1)}
    for tensors in (conv, {f"{LAYER}.diff": (UP @ DOWN).view(3, 1, 2, 2)}):
        (change,) = changes(write(tmp_path / "a.safetensors", tensors))
        assert not isinstance(change.delta, Bias)
        assert torch.equal(change.delta.dense(), UP @ DOWN)
