"""Qwen-Image against diffusers on the tiny checkpoint, alone and in unlike company."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformerBlock
from torch import nn

import omni_grpc.models
from omni_grpc.errors import CheckpointError
from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.models.qwen_image import TRANSFORMER_WEIGHTS
from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.pipeline.base import Done, Next
from omni_grpc.pipeline.batch import assemble, step
from omni_grpc.registry import open_checkpoint
from tools.parity_table import CASES, LONG, NEGATIVE, Case, load, run_diffusers, run_native

ROOT = Path(omni_grpc.models.__file__).resolve().parent


@pytest.fixture(scope="module")
def both(tiny_qwen_image: Path) -> tuple[QwenImagePipeline, Any]:
    return load(tiny_qwen_image)


@pytest.fixture(scope="module")
def native(both: tuple[QwenImagePipeline, Any]) -> QwenImagePipeline:
    return both[0]


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latents_and_images_are_those_of_diffusers(both: tuple[QwenImagePipeline, Any], case: Case) -> None:
    pipeline, oracle = both
    mine, theirs = run_native(pipeline, [case.request()])[0], run_diffusers(oracle, case.request())
    assert mine.latents.shape == theirs.latents.shape == (len(case.seeds), case.width * case.height // 256, 64)
    assert [image.shape for image in mine.images] == [(case.height, case.width, 3)] * len(case.seeds)
    assert all(image.std() > 1 for image in mine.images)
    latents, pixels = mine.differs_from(theirs)
    assert latents < 1e-4
    assert pixels <= 1


def test_bfloat16_is_as_close_to_diffusers_as_its_rounding(tiny_qwen_image: Path) -> None:
    pipeline, oracle = load(tiny_qwen_image, torch.bfloat16)
    request = CASES[2].request()
    mine, theirs = run_native(pipeline, [request])[0], run_diffusers(oracle, request)
    assert mine.latents.dtype == torch.bfloat16
    assert (mine.latents.float() - theirs.latents.float()).square().mean().sqrt() < 0.03


@pytest.mark.parametrize(("words", "dropped"), [(507, 0), (508, 1), (1200, 693)])
def test_tokens_that_do_not_fit_are_cut_like_in_diffusers_and_counted(
    both: tuple[QwenImagePipeline, Any], words: int, dropped: int
) -> None:
    """Of 512 tokens, 5 are the end of the prompt's template."""
    pipeline, oracle = both
    case = Case(prompt=" red" * words, negative_prompt=" blurry" * 520)
    (state,) = pipeline.prepare(case.request())
    assert state.prompt_tokens == min(words + 5, 512)
    assert state.dropped_tokens == {"negative_prompt": 13} | ({"prompt": dropped} if dropped else {})
    mine, theirs = run_native(pipeline, [case.request()])[0], run_diffusers(oracle, case.request())
    assert mine.differs_from(theirs)[0] < 1e-4


def test_rope_tables_are_those_of_diffusers(native: QwenImagePipeline) -> None:
    transformer = native.transformer
    oracle = QwenEmbedRope(theta=10000, axes_dim=list(transformer.axes), scale_rope=True)
    for height, width, tokens in ((4, 4, 7), (5, 3, 1), (1, 9, 512), (64, 128, 0)):
        image, text = oracle([[(1, height, width)]], device=torch.device("cpu"), max_txt_seq_len=tokens)
        expected = torch.view_as_real(torch.cat([text, image]))
        torch.testing.assert_close(transformer.rope(tokens, height, width), expected, atol=1e-6, rtol=0)


def test_tokens_at_a_second_level_are_modulated_by_their_own_vector(tmp_path: Path) -> None:
    """The edit models modulate reference images at t = 0: a row with two levels, which diffusers does by index."""
    generator = torch.Generator().manual_seed(0)
    oracle = QwenImageTransformerBlock(dim=64, num_attention_heads=2, attention_head_dim=32, zero_cond_t=True).eval()
    weights = {f"transformer_blocks.0.{name}": weight for name, weight in oracle.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / WEIGHT_FILE)
    module = nn.Module()
    module.stack = Stack(dual=[DualStreamBlock(num_heads=2, head_size=32)])
    load_weights(module, tmp_path, TRANSFORMER_WEIGHTS, device="cpu", dtype=torch.float32)

    sizes = [(9, 16, 24), (5, 48, 4)]
    rows = Rows(
        [(None, "cond")] * 2,
        [Row.of(txt=txt, img=((0, noise), (1, reference))) for txt, noise, reference in sizes],
        LayoutCache("cpu"),
    )
    txt, img, temb = (
        torch.randn(rows.stream(name).total, 64, generator=generator) for name in ("txt", "img", "mod")
    )  # fmt: skip
    angles = torch.randn(rows.stream(JOINT).total, 16, generator=generator)
    rows.bind("rope", JOINT, rows.stream(JOINT).split(torch.stack([angles.cos(), angles.sin()], -1)))
    with torch.no_grad():
        rows.bind("dual", "mod", rows.stream("mod").split(module.stack.modulation(nn.functional.silu(temb))["dual"]))
        out = module.stack({"txt": txt, "img": img}, rows)
        complex_angles = torch.polar(torch.ones_like(angles), angles)
        for row, (txt_tokens, noise, reference) in enumerate(sizes):
            freqs = complex_angles[rows.stream(JOINT).slice(row)]
            expected_txt, expected_img = oracle(
                img[rows.stream("img").slice(row)][None],
                txt[rows.stream("txt").slice(row)][None],
                None,
                temb[rows.stream("mod").slice(row)],
                image_rotary_emb=(freqs[txt_tokens:], freqs[:txt_tokens]),
                modulate_index=torch.tensor([[0] * noise + [1] * reference]),
            )
            for name, expected in (("txt", expected_txt), ("img", expected_img)):
                got = out[name][rows.stream(name).slice(row)]
                torch.testing.assert_close(got, expected[0], atol=1e-5, rtol=1e-5)


# --- company ----------------------------------------------------------------------------------------------------------

UNLIKE = (
    Case(seeds=(1,), steps=2),
    Case(width=96, prompt=LONG, negative_prompt=NEGATIVE, seeds=(2, 3), steps=3),
    Case(width=16, height=48, negative_prompt="", seeds=(4,), steps=4),
)


def test_unlike_requests_in_one_batch_are_what_each_is_alone(native: QwenImagePipeline) -> None:
    together = run_native(native, [case.request(str(number)) for number, case in enumerate(UNLIKE)])
    for mine, case in zip(together, UNLIKE, strict=True):
        (alone,) = run_native(native, [case.request()])
        latents, pixels = mine.differs_from(alone)
        assert latents < 1e-5
        assert pixels <= 1


@torch.inference_mode()
def test_a_request_that_joins_late_does_not_change_one_that_runs(native: QwenImagePipeline) -> None:
    (alone,) = run_native(native, [Case(steps=3).request()])
    (running,) = native.prepare(Case(steps=3).request())
    layouts = LayoutCache("cpu")
    step(native, assemble([running], layouts))
    (late,) = native.prepare(dataclasses.replace(UNLIKE[2], steps=2).request("late"))
    outcomes = [step(native, assemble([running, late], layouts)) for _ in range(2)]
    assert [[(state, type(outcome)) for state, outcome in tick] for tick in outcomes] == [
        [(running, Next), (late, Next)],
        [(running, Done), (late, Done)],
    ]
    assert (running.latents - alone.latents[0]).abs().max() < 1e-5


@torch.inference_mode()
def test_constants_are_packed_again_only_when_the_rows_change(native: QwenImagePipeline) -> None:
    states = native.prepare(UNLIKE[1].request())
    layouts = LayoutCache("cpu")
    first = assemble(states, layouts)
    assert [branch for _, branch in first.owners] == ["cond", "uncond"] * 2
    second = assemble(states, layouts, first)
    assert second["rope"] is first["rope"]
    assert second["txt"] is first["txt"]
    fewer = assemble(states[1:], layouts, second)
    assert fewer["rope"].shape[0] == first["rope"].shape[0] // 2


@torch.inference_mode()
def test_modulation_is_computed_once_for_all_steps_branches_outputs_and_requests(native: QwenImagePipeline) -> None:
    calls: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in native.transformer.named_modules()
        if isinstance(module, Linear) and module.stream == "mod"
    ]
    gc.collect()
    states = native.prepare(UNLIKE[1].request())
    again = native.prepare(UNLIKE[1].request("again"))
    rows = assemble(states, LayoutCache("cpu"))
    step(native, rows)
    blocks = len(native.transformer.stack)
    assert len(calls) == 2 + 2 * blocks + 1
    tables = {id(state.cond[branch].tables) for state in (*states, *again) for branch in state.cond}
    assert len(tables) == 1
    del states, again, rows
    gc.collect()
    native.prepare(UNLIKE[1].request("later"))
    assert len(calls) == 2 * (2 + 2 * blocks + 1)
    for hook in hooks:
        hook.remove()


def test_text_is_encoded_once_for_all_outputs(native: QwenImagePipeline) -> None:
    calls: list[int] = []
    hook = native.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    states = native.prepare(Case(negative_prompt=NEGATIVE, seeds=(1, 2, 3)).request())
    hook.remove()
    assert len(calls) == 2
    assert [(state.output, state.seed, state.index) for state in states] == [(0, 1, 0), (1, 2, 0), (2, 3, 0)]
    assert len({id(state.cond["cond"]) for state in states}) == 1
    assert len({state.latents.sum().item() for state in states}) == 3


# --- the folder -------------------------------------------------------------------------------------------------------


def test_sizes_follow_from_the_checkpoint(tiny_qwen_image: Path) -> None:
    checkpoint = open_checkpoint(tiny_qwen_image)
    assert (checkpoint.limits.size_multiple, checkpoint.limits.min_size) == (16, 16)
    flatter = {**checkpoint.configs, "vae": {**checkpoint.configs["vae"], "dim_mult": [1, 2]}}
    assert checkpoint.spec.limits(flatter).size_multiple == 4


@pytest.mark.parametrize("name", ["zero_cond_t", "guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"])
def test_a_variant_that_is_not_served_is_refused_by_name(native: QwenImagePipeline, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} = True is not served yet"):
        QwenImageTransformer.from_config({**native.checkpoint.configs["transformer"], name: True})


def test_a_tokenizer_that_splits_the_template_otherwise_is_refused(tiny_qwen_image: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen_image, tmp_path / "copy"))
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:50]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"starts with \d+ tokens, expected 34"):
        QwenImagePipeline.load(open_checkpoint(folder), torch.device("cpu"), torch.float32)


def test_the_spec_does_not_load_torch() -> None:
    code = "import sys, omni_grpc.models.qwen_image; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_model_files_name_no_feature() -> None:
    features = re.compile(
        r"lora|quanti[sz]|fp8|(?<!u)int8|gguf|tea_?cache|db_?cache|step_?cache|taylor|ulysses|ring_|parallel|offload|compile|"
        r"omni_grpc\.features|slots",
        re.IGNORECASE,
    )
    files = sorted(ROOT.glob("*/*.py"))
    assert files
    named = [f"{file.name}: {line.strip()}" for file in files for line in file.open() if features.search(line)]
    assert not named


def test_the_tiny_checkpoint_is_the_same_in_every_process(tiny_qwen_image: Path, tmp_path: Path) -> None:
    command = [sys.executable, "tools/tiny_checkpoints.py", "qwen_image", str(tmp_path / "again")]
    subprocess.run(command, cwd=ROOT.parent, check=True, capture_output=True)
    files = [file.relative_to(tiny_qwen_image) for file in tiny_qwen_image.rglob("*") if file.is_file()]
    assert len(files) > 8
    for file in files:
        assert (tiny_qwen_image / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
