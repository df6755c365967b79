"""`omni-grpc lora inspect`: what is in a file, what a model would take of it, and the exit code that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.cli.programs import run

QUERY, MODULATION = "transformer_blocks_0_attn_to_q", "transformer_blocks_1_img_mod_1"


def kohya(out: int = 128) -> dict[str, Tensor]:
    return {
        f"lora_unet_{QUERY}.lora_down.weight": torch.ones(4, 128),
        f"lora_unet_{QUERY}.lora_up.weight": torch.ones(out, 4),
        f"lora_unet_{QUERY}.alpha": torch.tensor(2.0),
        f"lora_unet_{MODULATION}.diff": torch.ones(768, 128),
        f"lora_unet_{MODULATION}.diff_b": torch.zeros(768),
        "lora_te_layer.lora_down.weight": torch.ones(4, 8),
        "lora_te_layer.lora_up.weight": torch.ones(8, 4),
        "something.else": torch.ones(1),
    }


def write(path: Path, tensors: dict[str, Tensor]) -> str:
    safetensors.torch.save_file(tensors, path)
    return str(path)


def test_a_report_says_what_is_there_and_what_a_model_takes_of_it(tiny_qwen_image: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "style.safetensors", kohya())
    code, out, _ = run("lora inspect", file, "--model", str(tiny_qwen_image), "--json")
    assert code == 0
    report = json.loads(out)
    assert report["format"] == "kohya"
    assert report["kinds"] == {"diff": 1, "LoRA": 2}
    assert (report["ranks"], report["alphas"], report["keys"]) == ([4], [2.0], 8)
    assert report["components"] == {"any denoiser": 2, "text encoder": 1}
    assert report["unknown"] == ["something.else"]
    assert report["layers"][f"lora_unet_{QUERY}"]["shapes"][f"lora_unet_{QUERY}.lora_down.weight"] == [4, 128]
    model = report["model"]
    assert model["applied"]["transformer"]["layers"] == {
        f"lora_unet_{QUERY}": ["transformer_blocks.0.attn.to_q"],
        f"lora_unet_{MODULATION}": ["transformer_blocks.1.img_mod.1"],
    }
    assert model["applied"]["transformer"]["keys"] == 4
    assert model["applied"]["transformer"]["bytes_of_whole_weights"] == 2 * 768 * 128
    assert model["skipped"] == {
        "something.else": "no part of an adapter that is known",
        "lora_te_layer.lora_down.weight": "text encoder",
        "lora_te_layer.lora_up.weight": "text encoder",
        f"lora_unet_{MODULATION}.diff_b": "zero",
    }
    assert (model["refused"], model["works"]) == ({}, True)


def test_a_report_can_be_read(tiny_qwen_image: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "style.safetensors", kohya())
    code, out, _ = run("lora inspect", file, "--model", str(tiny_qwen_image))
    assert code == 0
    for line in (
        f"{file}: kohya, 8 keys, {Path(file).stat().st_size} bytes",
        "kinds       LoRA 2, diff 1",
        f"  lora_unet_{QUERY}: LoRA, rank 4, alpha 2",
        f"    lora_unet_{QUERY} -> transformer_blocks.0.attn.to_q",
        "  transformer: 4 keys apply (LoRA 1, diff 1), 196608 bytes of whole weights (bfloat16)",
        f"    lora_unet_{MODULATION}.diff_b (zero)",
        "  it can be used",
    ):
        assert line in out.splitlines()
    code, alone, _ = run("lora inspect", file)
    assert code == 0
    assert out.startswith(alone)


def test_kinds_that_make_new_weights_are_told_with_what_copies_take(tiny_qwen_image: Path, tmp_path: Path) -> None:
    shapes = {"a1": (128, 2), "a2": (2, 128), "b1": (128, 2), "b2": (2, 128)}
    layer, norm = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.norm_q"
    tensors = {f"{layer}.{part}.weight": torch.ones(shape) for part, shape in shapes.items()}
    file = write(tmp_path / "a.safetensors", tensors | {f"{norm}.w_norm": torch.ones(32)})
    code, out, _ = run("lora inspect", file, "--model", str(tiny_qwen_image))
    assert code == 0
    for line in (
        "  transformer: 5 keys apply (norm diff 1, GLoRA 1), 32768 bytes or more of merged weights (bfloat16)",
        f"    {norm} -> {norm}",
    ):
        assert line in out.splitlines()


def test_a_file_that_the_model_would_not_take_ends_with_one(tiny_qwen_image: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_qwen_image))
    wrong = {**kohya(out=64), f"lora_unet_{MODULATION}.dora_scale": torch.ones(3, 1)}
    code, out, _ = run("lora inspect", write(tmp_path / "a.safetensors", wrong), *model)
    assert code == 1
    assert "changes a weight (64, 128), the model's is (128, 128)" in out
    assert f"lora_unet_{MODULATION}.dora_scale is (3, 1); a weight (768, 128) has 768 outputs" in out
    assert out.splitlines()[-1] == "  it cannot be used"
    pair = {f"blocks.7.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    code, out, _ = run("lora inspect", write(tmp_path / "b.safetensors", pair), *model)
    assert code == 1
    assert "    blocks.7.lora_A.weight (no such layer in the model)" in out.splitlines()
    code, out, err = run("lora inspect", write(tmp_path / "c.safetensors", {"weight": torch.ones(1)}), *model)
    assert (code, out) == (1, "")
    assert "BAD_LORA" in err
    assert "has no LoRA layers" in err


@pytest.mark.parametrize("missing", ["file", "model"])
def test_what_is_not_there_is_named(missing: str, tmp_path: Path) -> None:
    file = write(tmp_path / "style.safetensors", kohya())
    nothing = str(tmp_path / "nothing")
    arguments = [nothing] if missing == "file" else [file, "--model", nothing]
    code, out, err = run("lora inspect", *arguments)
    assert (code, out) == ((1, 2)[missing == "model"], "")
    assert nothing in err
