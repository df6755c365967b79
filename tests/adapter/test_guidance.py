"""What a reply says of guidance is what ran: scales of guiders, negative embeddings, defaults of the settings."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import extract_glyph_text

from omni_grpc.adapter.quirks import QUOTES
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.request import Draft, GuidanceDraft

from .conftest import equal, refused, same_memory

SMALL = {"width": 64, "height": 64}
SHORT = {**SMALL, "num_frames": 5, "steps": 2, "seeds": (0,)}


@pytest.fixture
def guided_by(tiny):
    """A call of plain diffusers, with a scale put into the guider that the pipeline has."""

    def call(like, scale, **arguments):
        pipeline = DiffusionPipeline.from_pretrained(tiny("hunyuan_video15"), local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        same_memory(pipeline, like.pipeline)
        if scale is not None:
            pipeline.guider = pipeline.guider.new(guidance_scale=scale)
        return pipeline(
            prompt="a red cat",
            num_inference_steps=2,
            num_frames=5,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
            **SMALL,
            **arguments,
        )[0]

    return call


def test_the_scale_is_that_of_the_guider_and_is_reported(load, guided_by):
    adapter = load("hunyuan_video15")
    assert adapter.checkpoint.defaults.guidance.scale == 6.0
    direct = [guided_by(adapter, None), guided_by(adapter, 3.0, negative_prompt="blurry"), guided_by(adapter, 1.0)]
    usual = adapter.run(**SHORT)
    assert usual.request.guidance.scale == 6.0
    assert equal(usual.output, direct[0])
    other = adapter.run(**SHORT, negative_prompt="blurry", guidance=GuidanceDraft(scale=3.0))
    assert other.request.guidance.scale == 3.0
    assert equal(other.output, direct[1])
    assert not equal(other.output, usual.output)
    assert equal(adapter.run(**SHORT, guidance=GuidanceDraft(scale=1.0)).output, direct[2])
    # nothing stays: neither the scale nor the step that the guider is at
    assert adapter.pipeline.guider.guidance_scale == 6.0
    assert adapter.pipeline.guider._step is None
    assert equal(adapter.run(**SHORT).output, usual.output)


def test_a_guider_that_is_off_has_no_scale(load, tiny, tmp_path):
    folder = shutil.copytree(tiny("hunyuan_video15"), tmp_path / "off")
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.guider.new(enabled=False).save_pretrained(folder / "guider")
    adapter = load(folder)
    request = adapter.request(**SHORT, guidance=GuidanceDraft(scale=3.0))
    assert request.guidance.scale is None


QUOTING, PLAIN = 'a shop with "open" on it', "a red cat"


@pytest.fixture
def hunyuan(tiny):
    """Calls of plain diffusers, with scales put into its two guiders."""
    folder = tiny("hunyuan_image")

    def call(like, prompt, scales, **arguments):
        pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        same_memory(pipeline, like.pipeline)
        for name, scale in scales.items():
            setattr(pipeline, name, getattr(pipeline, name).new(guidance_scale=scale))
        generator = torch.Generator().manual_seed(0)
        return pipeline(prompt, num_inference_steps=2, generator=generator, output_type="np", **SMALL, **arguments)[0]

    return call


def test_a_prompt_with_a_quoted_text_is_guided_by_the_scale_of_its_own_guider(load, hunyuan):
    adapter = load("hunyuan_image")
    fields = {**SMALL, "steps": 2, "seeds": (0,)}
    assert adapter.checkpoint.defaults.guidance.scale == 3.5
    for prompt, usual, guider in ((PLAIN, 3.5, "guider"), (QUOTING, 5.0, "ocr_guider")):
        found = resolved(adapter, **fields, prompt=prompt)
        assert (found.request.guidance.scale, found.defaults_used["sampling.guidance.scale"]) == (usual, str(usual))
        ran = adapter.run(**fields, prompt=prompt)
        assert equal(ran.output, hunyuan(adapter, prompt, {}))
        # asked for what is usual for the other prompts, and for something else
        for scale in (8.5 - usual, 2.0, 1.0):
            asked = adapter.run(**fields, prompt=prompt, guidance=GuidanceDraft(scale=scale))
            assert asked.request.guidance.scale == scale
            assert equal(asked.output, hunyuan(adapter, prompt, {guider: scale}))
            assert not equal(asked.output, ran.output)
    assert (adapter.pipeline.guider.guidance_scale, adapter.pipeline.ocr_guider.guidance_scale) == (3.5, 5.0)


def test_embeddings_of_a_quoted_text_count_as_one(load, hunyuan):
    adapter = load("hunyuan_image")
    _, _, embeds, mask = adapter.pipeline.encode_prompt(QUOTING, device="cpu")
    fields = {**SMALL, "steps": 2, "seeds": (0,)}
    for factor, prompt, scale in ((1, PLAIN, 5.0), (0, QUOTING, 3.5)):
        extra = {"prompt_embeds_2": embeds.detach() * factor, "prompt_embeds_mask_2": mask}
        ran = adapter.run(**fields, prompt=prompt, extra=extra)
        assert ran.request.guidance.scale == scale
        assert equal(ran.output, hunyuan(adapter, prompt, {}, **extra))
    # the prompt is not read where its embeddings are given
    first, first_mask, _, _ = adapter.pipeline.encode_prompt(PLAIN, device="cpu")
    extra |= {"prompt_embeds": first.detach(), "prompt_embeds_mask": first_mask}
    ran = adapter.run(**fields, prompt=QUOTING, extra=extra)
    assert ran.request.guidance.scale == 3.5
    assert equal(ran.output, hunyuan(adapter, None, {}, **extra))


@pytest.mark.parametrize(("off", "scales"), [("guider", (None, 5.0)), ("ocr_guider", (3.5, None))])
def test_a_prompt_whose_guider_is_off_is_not_guided_and_says_so(off, scales, load, tiny, tmp_path):
    folder = shutil.copytree(tiny("hunyuan_image"), tmp_path / "off")
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    getattr(pipeline, off).new(enabled=False).save_pretrained(folder / off)
    adapter = load(folder)
    for prompt, usual in zip((PLAIN, QUOTING), scales, strict=True):
        assert resolved(adapter, **SMALL, prompt=prompt).request.guidance.scale == usual
        found = resolved(adapter, **SMALL, prompt=prompt, guidance=GuidanceDraft(scale=2.0))
        assert found.request.guidance.scale == (None if usual is None else 2.0)
        codes = {warning.code for warning in found.warnings}
        assert ("GUIDANCE_WITHOUT_EFFECT" in codes) == (usual is None)
    fields = {**SMALL, "steps": 1, "seeds": (0,), "prompt": PLAIN if off == "guider" else QUOTING}
    asked = adapter.run(**fields, guidance=GuidanceDraft(scale=2.0))
    assert equal(asked.output, adapter.run(**fields).output)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        PLAIN,
        QUOTING,
        "the cat's hat",
        "the cat's and the dog's",
        "''",
        '"',
        "\u2018a\u2019",
        "\u201ca",
        "'a\nb'",
        'a"\n"',
    ],
)
def test_a_text_is_quoted_where_diffusers_finds_one(prompt):
    assert (re.search(QUOTES, prompt) is None) == (extract_glyph_text(prompt) is None)


def resolved(adapter, **fields):
    draft = Draft(model=adapter.checkpoint.name, **{"prompt": "a red cat"} | fields)
    return resolve_request(draft, ServingFacts(adapter.checkpoint, adapter.config.limits), id="job")


def test_negative_embeddings_turn_guidance_on_and_are_reported(load, plain):
    adapter = load("qwen_image")
    embeds, mask = adapter.pipeline.encode_prompt("blurry", device="cpu")
    extra = {"negative_prompt_embeds": embeds.detach(), "negative_prompt_embeds_mask": mask}
    fields = {**SMALL, "steps": 2, "seeds": (0,), "guidance": GuidanceDraft(true_cfg_scale=3.0)}
    found = resolved(adapter, **fields, extra=extra)
    assert found.request.guidance.true_cfg_scale == 3.0
    assert "CFG_OFF" not in {warning.code for warning in found.warnings}
    direct = plain(
        "qwen_image", like=adapter, true_cfg_scale=3.0, num_inference_steps=2, output_type="np", **SMALL, **extra
    )
    assert equal(adapter.run(**fields, extra=extra).output, direct)
    # without any, it is off and said to be
    found = resolved(adapter, **fields, extra={"negative_prompt_embeds": None})
    assert found.request.guidance.true_cfg_scale == 1.0
    assert "CFG_OFF" in {warning.code for warning in found.warnings}


def test_a_negative_prompt_of_the_settings_is_reported_with_its_scale(load, plain):
    kwargs = {"negative_prompt": "blurry", "true_cfg_scale": 2.0}
    adapter = load("flux", diffusers_call_kwargs=kwargs)
    guided = plain("flux", like=adapter, num_inference_steps=2, output_type="np", **kwargs, **SMALL)
    plainly = plain("flux", like=adapter, num_inference_steps=2, output_type="np", **SMALL)
    ran = adapter.run(**SMALL, steps=2, seeds=(0,))
    assert (ran.request.negative_prompt, ran.request.guidance.true_cfg_scale) == ("blurry", 2.0)
    assert equal(ran.output, guided)
    off = adapter.run(**SMALL, steps=2, seeds=(0,), guidance=GuidanceDraft(true_cfg_scale=1.0))
    assert off.request.guidance.true_cfg_scale == 1.0
    assert equal(off.output, plainly)


def test_none_stands_for_a_tensor_that_is_not_given(load):
    adapter = load("stable_diffusion")
    fields = {**SMALL, "steps": 2, "seeds": (0,)}
    nothing = {"prompt_embeds": None, "negative_prompt_embeds": None, "latents": None, "clip_skip": None}
    usual = adapter.run(**fields)
    ran = adapter.run(**fields, extra=nothing)
    assert equal(ran.output, usual.output)
    assert ran.warnings == {}
    embeds, _ = adapter.pipeline.encode_prompt("a red cat", "cpu", 1, False)
    ran = adapter.run(**fields, prompt="", extra={**nothing, "prompt_embeds": embeds.detach()})
    assert equal(ran.output, usual.output)
    assert ran.warnings == {}
    with pytest.raises(InvalidArgument, match="is empty") as caught:
        adapter.request(**fields, prompt="", extra=nothing)
    assert refused(caught.value) == {"prompt"}
    with pytest.raises(InvalidArgument, match="cannot be null in StableDiffusionPipeline; leave it out") as caught:
        adapter.run(**fields, extra={"eta": None})
    assert refused(caught.value) == {"extra.eta"}
    assert np.isfinite(ran.output).all()
