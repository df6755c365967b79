"""Checkpoints whose transformer is in 8 bits already: compressed-tensors and ModelOpt, made here from a tiny one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from omni_grpc.features.quant import CODES, QuantizedLinear
from omni_grpc.features.tensor_parallel import ColumnLinear, RowLinear, Share
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.nn.linear import Linear
from omni_grpc.ops.quant import LARGEST, quantize_rows
from omni_grpc.types.errors import CheckpointError, ConfigError
from tests.features.suite import denoisers
from tests.models.cases import ENTRIES
from tests.models.model import Model

ENTRY = ENTRIES["QwenImagePipeline"]
F8, I8 = CODES["fp8"], CODES["int8"]
BLOCKS = ("attn.", "_mlp.")
"""What all names of the layers that tokens pass in a block have one of; modulation has neither."""

Change = Callable[[dict[str, Tensor]], None]
Part = Mapping[str, Any]


def scheme(kind: str, by: str, **more: Any) -> Part:
    """A quantization_config of compressed-tensors."""
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": by, "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    layout = "int-quantized" if kind == "int" else "float-quantized"
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group | more}}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def per_channel(weight: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_rows(weight, kind)
    return codes, scale[:, None]


def per_tensor(weight: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax() / LARGEST[kind]
    scaled = weight / scale
    return (scaled.round() if kind == I8 else scaled).to(kind), scale


def store(
    source: Path,
    folder: Path,
    how: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]],
    kind: torch.dtype,
    config: Part,
    *,
    change: Change | None = None,
    only: str = "",
    static: bool = False,
    beside: bool = False,
) -> Path:
    """A copy of the checkpoint with the matrices of its transformer's blocks in 8 bits."""
    shutil.copytree(source, folder)
    component = folder / "transformer"
    weights = safetensors.torch.load_file(component / WEIGHT_FILE)
    for key in [key for key, weight in weights.items() if weight.dim() == 2 and any(part in key for part in BLOCKS)]:
        if key.endswith(".weight") and only in key:
            codes, scale = how(weights[key], kind)
            weights |= {key: codes, f"{key}_scale": scale}
            if static:
                weights[key.replace(".weight", ".input_scale")] = torch.tensor(0.02)
    if change is not None:
        change(weights)
    safetensors.torch.save_file({key: weight.contiguous() for key, weight in weights.items()}, component / WEIGHT_FILE)
    if beside:
        declared = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": config["quant_algo"]}}
        (component / "hf_quant_config.json").write_text(json.dumps(declared))
    else:
        content = json.loads((component / "config.json").read_text())
        (component / "config.json").write_text(json.dumps({**content, "quantization_config": config}))
    return folder


def layers(model: Model) -> dict[str, QuantizedLinear]:
    return {
        path: part
        for path, part in denoisers(model)["transformer"].named_modules()
        if isinstance(part, QuantizedLinear)
    }


def weights(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "transformer" / WEIGHT_FILE)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("fp8", scheme("float", "channel")), ("int8", scheme("int", "channel"))],
    ids=["float8", "int8"],
)
def test_scales_by_channel_are_what_quantising_while_loading_gives(
    kind: str, config: Part, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    folder = store(tiny_qwen_image, tmp_path / "stored", per_channel, CODES[kind], config)
    stored, online = Model(ENTRY, folder), Model(ENTRY, tiny_qwen_image, quantization=kind)
    assert stored.ready.found.quantized_layers == online.ready.found.quantized_layers == {kind: 16}
    assert stored.ready.weight_bytes == online.ready.weight_bytes
    draft = stored.guided(steps=2)
    (mine,), (expected,) = stored.run(draft), online.run(draft)
    assert torch.equal(mine.latents, expected.latents)
    # and the flag that says the same changes nothing
    assert Model(ENTRY, folder, quantization=kind).ready.found.quantized_layers == {kind: 16}


@pytest.mark.parametrize(
    ("kind", "config", "static", "beside"),
    [
        ("fp8", scheme("float", "tensor"), False, False),
        ("int8", scheme("int", "tensor"), False, False),
        ("fp8", MODELOPT, True, False),
        ("fp8", MODELOPT, True, True),
    ],
    ids=["float8", "int8", "modelopt", "modelopt beside"],
)
def test_scales_by_tensor_count_for_each_channel_of_their_part(
    kind: str, config: Part, static: bool, beside: bool, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    folder = store(tiny_qwen_image, tmp_path / "s", per_tensor, CODES[kind], config, static=static, beside=beside)
    model, file = Model(ENTRY, folder), weights(folder)
    assert model.ready.found.quantized_layers == {kind: 16}
    fused = layers(model)["stack.dual.1.attn.to_qkv"]
    start = 0
    for part in ("to_q", "to_k", "to_v"):
        codes, scale = (file[f"transformer_blocks.1.attn.{part}.{leaf}"] for leaf in ("weight", "weight_scale"))
        rows = slice(start, start := start + len(codes))
        assert torch.equal(fused.weight[rows].float(), codes.float())
        assert fused.scale[rows].tolist() == [scale.item()] * len(codes)
    assert len(set(fused.scale.tolist())) == 3, "the parts have scales of their own"
    plain = Model(ENTRY, tiny_qwen_image)
    (mine,), (exact,) = model.run(draft := model.draft(steps=2)), plain.run(draft)
    assert torch.nn.functional.cosine_similarity(mine.latents.flatten(), exact.latents.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("threads", ["3", None])
def test_under_offload_it_is_the_same(threads: str | None, tiny_qwen_image: Path, tmp_path: Path) -> None:
    folder = store(tiny_qwen_image, tmp_path / "stored", per_tensor, F8, MODELOPT, static=True)
    more = {"num_weight_load_threads": threads} if threads else {"disable_multithread_weight_load": True}
    resident, offloaded = Model(ENTRY, folder), Model(ENTRY, folder, enable_layerwise_offload=True, **more)
    assert offloaded.ready.found.quantized_layers == {"fp8": 16}
    draft = resident.draft(steps=2)
    assert torch.equal(resident.run(draft)[0].latents, offloaded.run(draft)[0].latents)


def dequantised(file: Mapping[str, Tensor], key: str) -> Tensor:
    return file[key].float() * file[f"{key}_scale"].reshape(-1, 1)


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_not_computed_in_8_bits_gets_what_its_codes_stand_for(
    offload: bool, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    """A layer that is left out, one outside of the blocks, and one of which a part alone is in 8 bits."""

    def change(weights: dict[str, Tensor]) -> None:
        codes, scale = per_channel(weights["img_in.weight"], F8)
        weights |= {"img_in.weight": codes, "img_in.weight_scale": scale}
        key = "transformer_blocks.0.attn.to_k.weight"
        weights[key] = dequantised(weights, key)
        del weights[f"{key}_scale"]

    folder = store(tiny_qwen_image, tmp_path / "s", per_channel, F8, scheme("float", "channel"), change=change)
    model = Model(ENTRY, folder, ignored_layers="dual.1.img_mlp.up", enable_layerwise_offload=offload)
    assert (model.ready.found.quantized_layers, model.ready.found.kept_layers) == ({"fp8": 14}, 2)
    file, denoiser = weights(folder), denoisers(model)["transformer"]

    def weight(path: str) -> Tensor:
        layer = denoiser.get_submodule(path)
        return layer.host["weight"] if offload and path.startswith("stack") else layer.weight

    expected = dequantised(file, "transformer_blocks.1.img_mlp.net.0.proj.weight")
    assert torch.equal(weight("stack.dual.1.img_mlp.up"), expected)
    assert torch.equal(weight("img_in"), dequantised(file, "img_in.weight"))
    block = "transformer_blocks.0.attn.to_"
    parts = [dequantised(file, f"{block}q.weight"), file[f"{block}k.weight"], dequantised(file, f"{block}v.weight")]
    assert torch.equal(weight("stack.dual.0.attn.to_qkv"), torch.cat(parts))


def test_modulation_stays_as_it_is_stored(tiny_qwen_image: Path, tmp_path: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        for key in [key for key in weights if key.endswith("_mod.1.weight")]:
            codes, scale = per_channel(weights[key], F8)
            weights |= {key: codes, f"{key}_scale": scale}

    folder = store(tiny_qwen_image, tmp_path / "s", per_channel, F8, scheme("float", "channel"), change=change)
    model = Model(ENTRY, folder)
    assert model.ready.found.quantized_layers == {"fp8": 20}
    assert layers(model)["stack.dual.0.txt_mod"].weight.dtype == F8
    assert model.run(model.draft(steps=1))[0].latents.isfinite().all()


def test_another_scheme_than_is_stored_is_refused(tiny_qwen_image: Path, tmp_path: Path) -> None:
    folder = store(tiny_qwen_image, tmp_path / "stored", per_channel, F8, scheme("float", "channel"))
    with pytest.raises(
        ConfigError, match="--quantization int8: the weights of transformer are stored in fp8"
    ) as caught:
        Model(ENTRY, folder, quantization="int8")
    assert [violation.field for violation in caught.value.violations] == ["quantization"]


def test_a_checkpoint_in_8_bits_of_which_no_layer_is_used_so_is_an_error(tiny_qwen_image: Path, tmp_path: Path) -> None:
    folder = store(tiny_qwen_image, tmp_path / "stored", per_channel, F8, scheme("float", "channel"))
    with pytest.raises(ConfigError, match="no layer of transformer") as caught:
        Model(ENTRY, folder, ignored_layers="stack")
    assert caught.value.reason == "NOTHING_QUANTIZED"


KEY = "transformer_blocks.1.attn.to_v"


def put(name: str, index: Any, value: float) -> Change:
    def change(weights: dict[str, Tensor]) -> None:
        tensor = weights[f"{KEY}.{name}"].float()
        tensor[index] = value
        weights[f"{KEY}.{name}"] = tensor.to(weights[f"{KEY}.{name}"].dtype)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(f"{KEY}.weight_scale"), rf"lack a scale \(weight_scale\): {KEY}\.weight$"),
        (put("weight_scale", (3, 0), 0.0), rf"{KEY}\.weight_scale is zero, negative or not finite in 1 of 128 places"),
        (put("weight_scale", (slice(4), 0), float("nan")), "not finite in 4 of 128 places"),
        (put("weight_scale", 0, -1.0), "zero, negative"),
        (put("weight", (0, 0), float("nan")), rf"{KEY}\.weight has values that are NaN"),
        (
            lambda weights: weights.update({f"{KEY}.weight_scale": torch.ones(2, 4)}),
            r"scales in blocks or groups, which are not served: .*to_v\.weight_scale \(2, 4\)",
        ),
        (lambda weights: weights.update({f"{KEY}.weight_zero_point": torch.zeros(1)}), "unexpected: .*zero_point"),
        (lambda weights: weights.update({"img_in.weight_scale": torch.ones(1)}), r"unexpected: img_in\.weight_scale"),
    ],
    ids=["missing", "zero", "NaN", "negative", "NaN code", "blocks", "zero point", "scale of nothing"],
)
def test_scales_that_are_missing_or_no_scales_are_refused_by_name(
    change: Change, message: str, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    folder = store(tiny_qwen_image, tmp_path / "s", per_channel, F8, scheme("float", "channel"), change=change)
    with pytest.raises(CheckpointError, match=message):
        Model(ENTRY, folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method bitsandbytes"),
        ({"quant_method": "torchao"}, "quant_method torchao"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method modelopt, quant_algo NVFP4"),
        ({**scheme("int", "group"), "format": "pack-quantized"}, "compressed-tensors, format pack-quantized"),
        (scheme("float", "block"), "weights with scales by block"),
        (scheme("float", "channel", input_activations=None), "with weights alone in 8 bits"),
        (scheme("int", "channel", weights={"num_bits": 4, "type": "int"}), "weights of 4 bits, type int"),
        (
            scheme("int", "channel", weights={"num_bits": 8, "type": "int", "symmetric": False}),
            "weights that are not symmetric",
        ),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "without config_groups"),
    ],
    ids=["bitsandbytes", "torchao", "NVFP4", "packed", "block", "weights alone", "4 bits", "asymmetric", "no groups"],
)
def test_schemes_that_are_not_served_are_refused_by_name(
    config: Part, message: str, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    folder = store(tiny_qwen_image, tmp_path / "stored", per_channel, F8, config)
    with pytest.raises(CheckpointError, match=message) as caught:
        Model(ENTRY, folder)
    assert caught.value.reason == "QUANTIZATION_NOT_SUPPORTED"
    assert "--diffusion-load-format diffusers" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_part_of_codes_and_scales(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns: rows of the weight with their scales. Rows: columns of the weight, with the scales of all rows."""
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    generator = torch.Generator().manual_seed(0)
    codes, scale = quantize_rows(torch.randn(12, 8, generator=generator), F8)
    with torch.device("meta"):
        whole = Linear(8, 12, bias=False, stream="img")
    for kind, parts in ((ColumnLinear, (1, 2)), (RowLinear, (1,))):
        split = kind(whole, Share("layer", parts, None))
        split.inner = QuantizedLinear(split.inner, "layer", F8)
        assert split.stored_dtype == F8
        assert split.activation_dtype == (F8 if kind is ColumnLinear else None), "a token's scale is that of all ranks"
        split.load_tensor("weight_scale", scale)
        split.load_tensor("weight", codes)
        if kind is ColumnLinear:
            rows = torch.cat([torch.arange(12)[kept] for kept in split.shard.outputs])
            assert torch.equal(split.inner.weight.float(), codes.float()[rows])
            assert torch.equal(split.inner.scale, scale[rows])
        else:
            assert torch.equal(split.inner.weight.float(), codes.float()[:, split.shard.inputs[0]])
            assert torch.equal(split.inner.scale, scale)
