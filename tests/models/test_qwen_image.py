"""What Qwen-Image does that other models do not. What all of them do is in test_conformance.py."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformerBlock
from torch import nn

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.loading.checkpoint import INDEX_FILE, WEIGHT_FILE, load_weights
from omni_grpc.loading.loader import Loader
from omni_grpc.models.qwen_image import TRANSFORMER_WEIGHTS
from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.pipeline.batch import assemble, predict
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import Draft
from tests.models.cases import ENTRIES
from tests.models.cases.ask import LONG, NEGATIVE, ask
from tests.models.model import Model, label
from tools.tiny_checkpoints import build_qwen_image_2512

ENTRY = ENTRIES["QwenImagePipeline"]
PAIR = ask(96, prompt=LONG, negative_prompt=NEGATIVE, seeds=(2, 3), steps=3)


@pytest.fixture(scope="module")
def model(tiny_qwen_image: Path) -> Model:
    return Model(ENTRY, tiny_qwen_image)


@pytest.fixture(scope="module")
def native(model: Model) -> QwenImagePipeline:
    assert isinstance(model.pipeline, QwenImagePipeline)
    return model.pipeline


# --- parity -----------------------------------------------------------------------------------------------------------


def test_bfloat16_is_as_close_to_diffusers_as_its_rounding(tiny_qwen_image: Path) -> None:
    model, draft = Model(ENTRY, tiny_qwen_image, dtype="bfloat16"), ENTRY.drafts[2]
    (mine,), theirs = model.run(draft), model.oracle(draft)
    assert mine.latents.dtype == torch.bfloat16
    assert (mine.latents.float() - theirs.latents.float()).square().mean().sqrt() < 0.03


@pytest.fixture(scope="module")
def december(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Qwen-Image-2512 as it is released."""
    return Model(ENTRY, build_qwen_image_2512(tmp_path_factory.mktemp("checkpoints") / "qwen_image_2512"))


@pytest.mark.parametrize("draft", ENTRY.drafts, ids=label)
def test_qwen_image_2512_is_the_same_model_in_another_folder(december: Model, draft: Draft) -> None:
    (mine,), theirs = december.run(draft), december.oracle(draft)
    assert mine.latents.shape == theirs.latents.shape
    latents, pixels = mine.differs_from(theirs)
    assert latents < 1e-4
    assert pixels <= 1
    assert all(image.std() > 1 for image in mine.images)


def test_qwen_image_2512_has_the_form_of_the_released_one(december: Model) -> None:
    """What makes the folder another one, and what is taken from it all the same."""
    folder = december.checkpoint.path
    for component, index in (("transformer", INDEX_FILE), ("text_encoder", "model.safetensors.index.json")):
        assert (folder / component / index).is_file()
        assert len(list((folder / component).glob("*.safetensors"))) > 1
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    assert "text_config" not in config
    assert "zero_cond_t" not in json.loads((folder / "transformer" / "config.json").read_text())
    assert config["rope_scaling"]["mrope_section"] == [2, 3, 3]


@pytest.mark.parametrize(("words", "dropped"), [(507, 0), (508, 1), (1200, 693)])
def test_tokens_that_do_not_fit_are_cut_like_in_diffusers_and_counted(model: Model, words: int, dropped: int) -> None:
    """Of 512 tokens, 5 are the end of the prompt's template."""
    draft = ask(prompt=" red" * words, negative_prompt=" blurry" * 520)
    (state,) = model.pipeline.prepare(model.request(draft))
    assert state.prompt_tokens == min(words + 5, 512)
    assert state.dropped_tokens == {"negative_prompt": 13} | ({"prompt": dropped} if dropped else {})
    (mine,) = model.run(draft)
    assert mine.differs_from(model.oracle(draft))[0] < 1e-4


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


# --- computed once ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_constants_are_packed_again_only_when_the_rows_change(model: Model) -> None:
    states = model.pipeline.prepare(model.request(PAIR))
    layouts = LayoutCache("cpu")
    first = assemble(states, layouts)
    assert [branch for _, branch in first.owners] == ["cond", "uncond"] * 2
    second = assemble(states, layouts, first)
    assert second["rope"] is first["rope"]
    assert second["txt"] is first["txt"]
    fewer = assemble(states[1:], layouts, second)
    assert fewer["rope"].shape[0] == first["rope"].shape[0] // 2


@torch.inference_mode()
def test_modulation_is_computed_once_for_all_steps_branches_outputs_and_requests(
    model: Model, native: QwenImagePipeline
) -> None:
    calls: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in native.transformer.named_modules()
        if isinstance(module, Linear) and module.stream == "mod"
    ]
    gc.collect()
    states = native.prepare(model.request(PAIR))
    again = native.prepare(model.request(PAIR, "again"))
    rows = assemble(states, LayoutCache("cpu"))
    predict(native, rows)
    blocks = len(native.transformer.stack)
    assert len(calls) == 2 + 2 * blocks + 1
    tables = {id(state.cond[branch].tables) for state in (*states, *again) for branch in state.cond}
    assert len(tables) == 1
    del states, again, rows
    gc.collect()
    native.prepare(model.request(PAIR, "later"))
    assert len(calls) == 2 * (2 + 2 * blocks + 1)
    for hook in hooks:
        hook.remove()


def test_text_is_encoded_once_for_all_outputs(model: Model, native: QwenImagePipeline) -> None:
    calls: list[int] = []
    hook = native.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    states = native.prepare(model.request(ask(negative_prompt=NEGATIVE, seeds=(1, 2, 3))))
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
        QwenImagePipeline.load(
            Loader(checkpoint=open_checkpoint(folder), device=torch.device("cpu"), dtype=torch.float32)
        )
