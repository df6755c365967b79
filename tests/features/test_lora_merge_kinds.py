"""`lora merge` of changes that are no sums, against formulas of their papers and tools, written here once more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.loading.adapters.merge import Fold, merge
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.types.errors import ConfigError
from tests.models.cases import ENTRIES

LAYER, SCALE, RANK, ALPHA = "transformer_blocks.0.attn.to_q", 0.6, 4, 2.0
Tensors = dict[str, Tensor]


def random(*shape: int, seed: int = 1, scale: float = 0.1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def weights(folder: Path, component: str = "transformer", file: str = WEIGHT_FILE) -> Tensors:
    return safetensors.torch.load_file(folder / component / file)


def dora(w: Tensor, side: str) -> tuple[Tensors, Tensor]:
    """PEFT's: the strength is inside of the norm."""
    down, up = random(RANK, w.shape[1]), random(w.shape[0], RANK, seed=2)
    v = w + SCALE * ALPHA / RANK * up @ down
    dim = 0 if side == "inputs" else 1
    magnitude = 1 + random(w.shape[1 - dim], seed=3).abs()
    shaped = magnitude[None] if side == "inputs" else magnitude[:, None]
    key = {"inputs": "dora_scale", "outputs": "dora_scale", "peft": "lora_magnitude_vector"}[side]
    tensors = {
        f"{LAYER}.lora_A.weight": down,
        f"{LAYER}.lora_B.weight": up,
        f"{LAYER}.{key}": magnitude if side == "peft" else shaped.contiguous(),
        f"{LAYER}.alpha": torch.tensor(ALPHA),
    }
    return tensors, v * shaped / v.pow(2).sum(dim, keepdim=True).sqrt()


def glora(w: Tensor) -> tuple[Tensors, Tensor]:
    (out, inside), s = w.shape, SCALE * ALPHA / RANK
    a1, a2 = random(inside, RANK, seed=4), random(RANK, inside, seed=5)
    b1, b2 = random(out, RANK, seed=6), random(RANK, inside, seed=7)
    named = {"a1": a1, "a2": a2, "b1": b1, "b2": b2}
    tensors = {f"{LAYER}.{name}.weight": x for name, x in named.items()} | {f"{LAYER}.alpha": torch.tensor(ALPHA)}
    return tensors, w + s * (w @ a1 @ a2 + b1 @ b2)


def lycoris_oft(w: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks over outputs, R = (I + Q) (I - Q)^-1, and W + s (R^T W - W)."""
    size, blocks = 16, w.shape[0] // 16
    raw = random(blocks, size, size, seed=8)
    q, eye = raw - raw.transpose(1, 2), torch.eye(size)
    turned = torch.stack(
        [((eye + one) @ torch.linalg.inv(eye - one)).T @ rows for one, rows in zip(q, w.split(size), strict=True)]
    ).reshape(w.shape)
    return {f"{LAYER}.oft_blocks": raw}, w + SCALE * (turned - w)


def replaced(w: Tensor) -> tuple[Tensors, Tensor]:
    other = random(*w.shape, seed=9)
    return {f"{LAYER}.set_weight": other}, w + SCALE * (other - w)


KINDS: dict[str, Callable[[Tensor], tuple[Tensors, Tensor]]] = {
    "DoRA, outputs": lambda w: dora(w, "outputs"),
    "DoRA, PEFT": lambda w: dora(w, "peft"),
    "DoRA, inputs": lambda w: dora(w, "inputs"),
    "GLoRA": glora,
    "OFT": lycoris_oft,
    "set_weight": replaced,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_what_its_formula_says(kind: str, tiny_qwen_image: Path, tmp_path: Path) -> None:
    before = weights(tiny_qwen_image)
    tensors, wanted = KINDS[kind](before[f"{LAYER}.weight"])
    safetensors.torch.save_file(tensors, tmp_path / "style.safetensors")
    merge(open_checkpoint(tiny_qwen_image), [Fold(path=tmp_path / "style.safetensors", scale=SCALE)], tmp_path / "out")
    after = weights(tmp_path / "out")
    torch.testing.assert_close(after.pop(f"{LAYER}.weight"), wanted, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())


def test_norms_and_tables_are_added_to(tiny_qwen_image: Path, tmp_path: Path) -> None:
    norm = "transformer_blocks.0.attn.norm_q"
    before = weights(tiny_qwen_image)
    change = random(*before[f"{norm}.weight"].shape)
    safetensors.torch.save_file({f"{norm}.diff": change}, tmp_path / "norm.safetensors")
    merge(open_checkpoint(tiny_qwen_image), [Fold(path=tmp_path / "norm.safetensors", scale=0.5)], tmp_path / "out")
    wanted = before[f"{norm}.weight"] + 0.5 * change
    torch.testing.assert_close(weights(tmp_path / "out")[f"{norm}.weight"], wanted, rtol=0, atol=1e-6)

    wan = ENTRIES["WanPipeline"].build(tmp_path / "wan")
    table = weights(wan)["blocks.0.scale_shift_table"]
    moved = random(*table.shape)
    safetensors.torch.save_file({"diffusion_model.blocks.0.diff_m": moved}, tmp_path / "table.safetensors")
    folds = [Fold(path=tmp_path / "table.safetensors", scale=0.5, component="transformer_2")]
    report = merge(open_checkpoint(wan), folds, tmp_path / "moved")
    assert report["tensors"] == {"transformer_2": 1}
    after = weights(tmp_path / "moved", "transformer_2")["blocks.0.scale_shift_table"]
    other = weights(wan, "transformer_2")["blocks.0.scale_shift_table"]
    torch.testing.assert_close(after, other + 0.5 * moved, rtol=0, atol=1e-6)
    assert torch.equal(weights(tmp_path / "moved")["blocks.0.scale_shift_table"], table), "the other expert's stays"


def test_a_layer_that_is_three_of_the_checkpoint_is_rescaled_as_one_after_what_came_before(tmp_path: Path) -> None:
    """DoRA by inputs of a fused layer of FLUX, whose norms run over the rows of all three, and after a LoRA of one."""
    folder = ENTRIES["FluxPipeline-schnell"].build(tmp_path / "flux")
    before = weights(folder)
    names = [f"transformer_blocks.0.attn.to_{part}.weight" for part in "qkv"]
    first = {
        "transformer.transformer_blocks.0.attn.to_k.lora_A.weight": random(2, before[names[1]].shape[1]),
        "transformer.transformer_blocks.0.attn.to_k.lora_B.weight": random(before[names[1]].shape[0], 2, seed=2),
    }
    w = torch.cat([before[name] for name in names])
    rows = w.shape[0] // 3
    inner, outer = first.values()
    w[rows : 2 * rows] += outer @ inner
    down, up, magnitude = (
        random(RANK, w.shape[1], seed=3),
        random(w.shape[0], RANK, seed=4),
        random(w.shape[1]).abs() + 1,
    )
    fused = "lora_unet_double_blocks_0_img_attn_qkv"
    second = {
        f"{fused}.lora_down.weight": down,
        f"{fused}.lora_up.weight": up,
        f"{fused}.dora_scale": magnitude[None].contiguous(),
    }
    for name, tensors in (("first", first), ("second", second)):
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    folds = [Fold(path=tmp_path / f"{name}.safetensors") for name in ("first", "second")]
    merge(open_checkpoint(folder), folds, tmp_path / "out")
    v = w + up @ down
    wanted = v * magnitude / v.pow(2).sum(0, keepdim=True).sqrt()
    after = weights(tmp_path / "out")
    torch.testing.assert_close(torch.cat([after[name] for name in names]), wanted, rtol=1e-4, atol=1e-5)


def test_a_text_encoder_is_merged_by_the_names_of_its_tools(tmp_path: Path) -> None:
    folder = ENTRIES["FluxPipeline-schnell"].build(tmp_path / "flux")
    layer, file = "text_model.encoder.layers.0.mlp.fc1", "model.safetensors"
    before = weights(folder, "text_encoder", file)
    key = next(key for key in before if key.endswith("encoder.layers.0.mlp.fc1.weight"))
    down, up = random(RANK, before[key].shape[1]), random(before[key].shape[0], RANK, seed=2)
    name = f"lora_te1_{layer.replace('.', '_')}"
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0)}
    safetensors.torch.save_file(tensors, tmp_path / "style.safetensors")
    report = merge(open_checkpoint(folder), [Fold(path=tmp_path / "style.safetensors")], tmp_path / "out")
    assert report["tensors"] == {"text_encoder": 1}
    after = weights(tmp_path / "out", "text_encoder", file)[key]
    torch.testing.assert_close(after, before[key] + 0.5 * up @ down, rtol=0, atol=1e-6)


def test_wider_layers_are_refused_by_name(tiny_qwen_image: Path, tmp_path: Path) -> None:
    tensors, _ = dora(weights(tiny_qwen_image)[f"{LAYER}.weight"], "outputs")
    tensors[f"{LAYER}.reshape_weight"] = torch.tensor([128.0, 256.0])
    del tensors[f"{LAYER}.dora_scale"]
    safetensors.torch.save_file(tensors, tmp_path / "wide.safetensors")
    with pytest.raises(ConfigError, match="reshape_weight gives a layer more inputs"):
        merge(open_checkpoint(tiny_qwen_image), [Fold(path=tmp_path / "wide.safetensors")], tmp_path / "out")
