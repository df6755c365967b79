"""What Z-Image does that other models do not. What all of them do is in test_conformance.py."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from pathlib import Path

import pytest
import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.loading.loader import Loader
from omni_grpc.models.z_image.pipeline_text_to_image import ZImagePipeline
from omni_grpc.models.z_image.z_image_transformer import ZImageTransformer
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import LayoutCache
from omni_grpc.pipeline.batch import assemble, predict
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.events import Completed
from omni_grpc.types.request import GuidanceDraft
from tests.models.cases.ask import LONG, NEGATIVE, ask
from tests.models.cases.z_image import ENTRY, z_image
from tests.models.live import ended, live
from tests.models.model import Model
from tools.tiny_checkpoints import build_z_image

TEMPLATE = 6
"""Tokens that the chat template of the tiny checkpoint adds to a prompt."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_z_image(tmp_path_factory.mktemp("checkpoints") / "tiny-z-image")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return Model(ENTRY, tiny)


@pytest.fixture(scope="module")
def native(model: Model) -> ZImagePipeline:
    assert isinstance(model.pipeline, ZImagePipeline)
    return model.pipeline


# --- parity -----------------------------------------------------------------------------------------------------------


def test_bfloat16_is_as_close_to_diffusers_as_its_rounding(tiny: Path) -> None:
    model, draft = Model(ENTRY, tiny, dtype="bfloat16"), ENTRY.drafts[2]
    (mine,), theirs = model.run(draft), model.oracle(draft)
    assert mine.latents.dtype == torch.float32, "only the weights are bfloat16"
    assert (mine.latents - theirs.latents).square().mean().sqrt() < 0.01


@pytest.mark.parametrize(
    ("words", "tokens", "dropped"),
    [(25, 32, 0), (26, 32, 0), (27, 64, 0), (506, 512, 0), (507, 512, 1), (999, 512, 493)],
)
def test_text_is_filled_up_to_32_tokens_and_cut_at_512(model: Model, words: int, tokens: int, dropped: int) -> None:
    draft = ask(prompt=" red" * words)
    (state,) = model.pipeline.prepare(model.request(draft))
    assert dict(zip(("txt", "img"), state.cond["cond"].row.lengths, strict=True)) == {"txt": tokens, "img": 32}
    assert state.prompt_tokens == min(words + TEMPLATE, 512)
    assert state.dropped_tokens == ({"prompt": dropped} if dropped else {})
    (mine,) = model.run(draft)
    assert mine.differs_from(model.oracle(draft))[0] < 1e-4


@pytest.mark.parametrize(("width", "height", "text"), [(64, 64, 9), (128, 64, 32), (16, 144, 33), (1024, 1024, 500)])
def test_rope_tables_are_those_of_diffusers(model: Model, native: ZImagePipeline, width, height, text) -> None:
    theirs, channels = model.diffusers.transformer, native.transformer.latent_channels
    image, words = torch.zeros(channels, 1, height // 8, width // 8), torch.zeros(text, 1)
    *_, (image_ids,), (text_ids,), _, _ = theirs.patchify_and_embed([image], [words], 2, 1)
    # diffusers makes places for the padding of the text twice, and leaves out the second
    filled = text + -text % 32
    expected = torch.view_as_real(theirs.rope_embedder(torch.cat([text_ids[:filled], image_ids])))
    # angles are rounded to float32 there, and turned into cosines in float64 here
    got = native.transformer.rope(filled, height // 16, width // 16)
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)


# --- guidance ---------------------------------------------------------------------------------------------------------


async def test_the_scale_that_is_reported_is_the_one_that_was_asked_for(model: Model) -> None:
    draft = ask(negative_prompt=NEGATIVE, guidance=GuidanceDraft(true_cfg_scale=5.0))
    async with live(model.checkpoint) as it:
        job = it.submit(draft)
        await ended(job)
        (latents,), _ = it.outcome(job)
        (done,) = (entry.event for entry in job.entries if isinstance(entry.event, Completed))
        assert done.effective.guidance.true_cfg_scale == 5.0
    assert (latents - model.oracle(draft).latents[0]).abs().max() < 1e-4


@pytest.mark.parametrize("truncation", [0.1, 0.6])
def test_truncation_is_an_interval(model: Model, truncation: float) -> None:
    """diffusers guides while 1 - sigma <= cfg_truncation; the formula is the one in the README."""
    shift, sigma = 3.0, 1 - truncation
    end = 1 - sigma / (shift - (shift - 1) * sigma)
    draft = ask(
        steps=8, negative_prompt=NEGATIVE, guidance=GuidanceDraft(true_cfg_scale=4.0, interval_end=end), seeds=(3,)
    )
    (mine,) = model.run(draft)
    theirs = z_image(model.diffusers, model.request(draft), cfg_truncation=truncation)
    assert mine.differs_from(theirs)[0] < 1e-4
    assert mine.differs_from(model.oracle(draft))[0] > 1e-3


def test_defaults_tell_the_distilled_model_by_its_schedule(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert (checkpoint.defaults.steps, checkpoint.defaults.guidance.true_cfg_scale) == (8, 0.0)
    base = dataclasses.replace(
        checkpoint, configs={**checkpoint.configs, "scheduler": {**checkpoint.configs["scheduler"], "shift": 6.0}}
    )
    assert (base.defaults.steps, base.defaults.guidance.true_cfg_scale) == (50, 5.0)


# --- computed once ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_text_and_modulation_are_computed_once(model: Model, native: ZImagePipeline) -> None:
    transformer = native.transformer
    refined: list[str] = []
    modulated: list[str] = []
    hooks = [transformer.context_refiner.register_forward_hook(lambda *_: refined.append("text"))]
    hooks += [
        module.register_forward_hook(lambda *_, name=name: modulated.append(name))
        for name, module in transformer.named_modules()
        if isinstance(module, Linear) and module.stream == "mod"
    ]
    gc.collect()
    draft = ask(96, prompt=LONG, negative_prompt=NEGATIVE, guidance=GuidanceDraft(true_cfg_scale=2.0), seeds=(1, 2, 3))
    states = native.prepare(model.request(draft))
    again = native.prepare(model.request(draft, "again"))
    predict(native, assemble([*states, *again], LayoutCache("cpu")))
    for hook in hooks:
        hook.remove()
    assert len(refined) == 4, "two prompts of two requests"
    assert len(modulated) == 2 + len(transformer.noise_refiner) + len(transformer.stack) + 1


# --- the folder -------------------------------------------------------------------------------------------------------


def test_sizes_follow_from_the_checkpoint(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    limits = checkpoint.limits
    assert (limits.size_multiple, limits.max_size, limits.max_pixels) == (16, 1024, 1024**2)
    released = {
        **checkpoint.configs,
        "transformer": {**checkpoint.configs["transformer"], "axes_lens": [1536, 512, 512]},
    }
    limits = checkpoint.spec.limits(released)
    assert (limits.max_size, limits.max_pixels) == (4096, 2048**2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("siglip_feat_dim", 1152),
        ("all_patch_size", [2, 4]),
        ("all_f_patch_size", [2]),
        ("qk_norm", False),
        ("n_kv_heads", 2),
    ],
)
def test_a_variant_that_is_not_served_is_refused_by_name(native: ZImagePipeline, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"transformer: {name} = .* is not served yet"):
        ZImageTransformer.from_config({**native.checkpoint.configs["transformer"], name: value})


def test_a_tokenizer_without_a_chat_template_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    loader = Loader(checkpoint=open_checkpoint(folder), device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="no chat template"):
        ZImagePipeline.load(loader)
