"""What FLUX.1 does that other models do not. What all of them do is in test_conformance.py."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch import Tensor

from omni_grpc.models.flux import kontext_limits, limits
from omni_grpc.models.flux.flux_transformer import FluxTransformer
from omni_grpc.models.flux.kontext_preprocess import SIZES, nearest_size
from omni_grpc.models.flux.pipeline_text_to_image import FluxPipeline
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import LayoutCache
from omni_grpc.pipeline.batch import assemble, predict
from omni_grpc.types.errors import CheckpointError, InvalidArgument
from omni_grpc.types.events import Completed, StepProgress
from omni_grpc.types.media import Inputs
from omni_grpc.types.request import Draft, GuidanceDraft
from omni_grpc.types.spec import GuidanceKind
from tests.models.cases import ENTRIES, LONG, ask
from tests.models.cases.flux import guided, scaled, shown
from tests.models.live import ended, live
from tests.models.model import Model

HEUN = "FlowMatchHeunDiscreteScheduler"
PAIR = ask(prompt=LONG, seeds=(2, 3), steps=3, **guided())


def made(name: str, folder: Path, **more: Any) -> Model:
    return Model(ENTRIES[name], ENTRIES[name].build(folder / name), **more)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made("FluxPipeline", tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made("FluxPipeline-schnell", tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made("FluxKontextPipeline", tmp_path_factory.mktemp("flux"))


def flux(model: Model) -> FluxPipeline:
    assert isinstance(model.pipeline, FluxPipeline)
    return model.pipeline


def close(mine: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


# --- parity -----------------------------------------------------------------------------------------------------------


def test_bfloat16_is_as_close_to_diffusers_as_its_rounding(tmp_path: Path) -> None:
    model, draft = made("FluxPipeline", tmp_path, dtype="bfloat16"), ask(96, prompt=LONG, steps=4, **scaled(3.5))
    (mine,), theirs = model.run(draft), model.oracle(draft)
    assert mine.latents.dtype == torch.bfloat16
    assert (mine.latents.float() - theirs.latents.float()).square().mean().sqrt() < 0.03
    # a timestep, and a scale, are rounded after they are multiplied
    embeds = flux(model).transformer.time_text_embed, model.diffusers.transformer.time_text_embed
    t, pooled = torch.tensor([0.8796, 0.3333], dtype=torch.bfloat16), torch.randn(1, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        ours = embeds[0](t, pooled, 3.3)
        expected = embeds[1](1000 * t, 1000 * torch.tensor([3.3], dtype=torch.bfloat16), pooled)
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_tokens_that_do_not_fit_are_cut_like_in_diffusers_and_counted(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(name)
    most = model.checkpoint.limits.max_prompt_tokens
    assert most == {"dev": 512, "schnell": 256}[name]
    # the last token says that the text ends
    draft = ask(
        prompt="red " * (most + 8), negative_prompt="bird " * (most - 1), guidance=GuidanceDraft(true_cfg_scale=2)
    )
    (state,) = model.pipeline.prepare(model.request(draft))
    assert state.prompt_tokens == most
    assert state.dropped_tokens == {"prompt": 9}
    assert [cond.row.lengths[0] for cond in state.cond.values()] == [most, most]
    (mine,) = model.run(draft)
    assert mine.differs_from(model.oracle(draft))[0] < 1e-4


def test_rope_tables_are_those_of_diffusers(kontext: Model) -> None:
    transformer = flux(kontext).transformer
    oracle = FluxPosEmbed(theta=10000, axes_dim=list(transformer.axes))
    ids = pipeline_flux_kontext.FluxKontextPipeline._prepare_latent_image_ids
    for tokens, (height, width), (ref_height, ref_width) in ((7, (4, 4), (5, 3)), (512, (1, 9), (64, 128))):
        picture, reference = (
            ids(1, *size, "cpu", torch.float32) for size in ((height, width), (ref_height, ref_width))
        )
        reference[:, 0] = 1
        cos, sin = oracle(torch.cat([torch.zeros(tokens, 3), picture, reference]))
        expected = torch.stack([cos[:, ::2], sin[:, ::2]], -1)
        close(transformer.rope(tokens, (height, width), (ref_height, ref_width)), expected, 1e-6)
        close(transformer.rope(tokens, (height, width)), expected[: tokens + height * width], 1e-6)


# --- the embedded scale -----------------------------------------------------------------------------------------------


def test_the_scale_is_embedded_per_request_and_neighbours_keep_theirs(dev: Model) -> None:
    drafts = [ask(seeds=(1,), **scaled(scale)) for scale in (0.0, 3.5, 10.0)]
    together = dev.run(*drafts)
    for draft, result in zip(drafts, together, strict=True):
        (alone,) = dev.run(draft)
        close(result.latents, alone.latents)
    assert (together[0].latents - together[1].latents).abs().max() > 1e-3
    assert (together[1].latents - together[2].latents).abs().max() > 1e-3
    assert dev.request(ask()).guidance.scale == 3.5


def test_schnell_has_no_embedded_scale_and_few_steps(dev: Model, schnell: Model) -> None:
    assert dev.checkpoint.guidance == (GuidanceKind.EMBEDDED, GuidanceKind.TRUE_CFG)
    assert schnell.checkpoint.guidance == (GuidanceKind.TRUE_CFG,)
    assert (dev.checkpoint.defaults.steps, schnell.checkpoint.defaults.steps) == (28, 4)
    assert flux(schnell).transformer.time_text_embed.guidance_embedder is None
    draft = ask(**scaled(3.5))
    assert schnell.request(draft).guidance.scale is None
    (state,) = schnell.pipeline.prepare(schnell.request(dataclasses.replace(draft, steps=4)))
    assert state.schedule.sigmas == pytest.approx((1.0, 0.75, 0.5, 0.25, 0.0)), "the shift is 1 whatever the size"


# --- computed once ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_text_and_modulation_are_computed_once_for_all_steps_and_outputs(dev: Model) -> None:
    calls: list[str] = []
    pipeline = flux(dev)
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in pipeline.named_modules()
        if (isinstance(module, Linear) and module.stream == "mod") or name in ("text_encoder", "text_encoder_2")
    ]
    states = pipeline.prepare(dev.request(PAIR))
    predict(pipeline, assemble(states, LayoutCache("cpu")))
    for hook in hooks:
        hook.remove()
    assert len({id(state.cond["cond"]) for state in states}) == 1
    assert sorted(states[0].cond) == ["cond", "uncond"]
    assert calls.count("text_encoder") == calls.count("text_encoder_2") == 2
    assert {calls.count(name) for name in calls} == {2}, "once for each of the two texts"
    # two linear layers for the timestep, the scale and the text each; two in a dual block, one in a single one
    assert len(set(calls)) == 2 + 3 * 2 + 2 * 2 + 2 * 1 + 1


# --- Kontext ----------------------------------------------------------------------------------------------------------


def test_requests_with_and_without_pictures_share_steps(kontext: Model) -> None:
    drafts = (
        ask(seeds=(1,), steps=3, **shown(64, 64)),
        ask(48, 96, seeds=(2, 3), prompt=LONG, **shown(131, 50, seed=4), **guided()),
        ask(seeds=(4,), steps=4),
    )
    for draft, together in zip(drafts, kontext.run(*drafts), strict=True):
        (alone,) = kontext.run(draft)
        close(together.latents, alone.latents)


def test_a_picture_changes_what_is_made(kontext: Model) -> None:
    drafts = [ask(), ask(**shown(64, 64)), ask(**shown(64, 64, seed=1))]
    plain, one, other = (kontext.run(draft)[0].latents for draft in drafts)
    assert (plain - one).abs().max() > 1e-3
    assert (one - other).abs().max() > 1e-3


@torch.inference_mode()
def test_several_references_follow_the_latents_in_order(kontext: Model) -> None:
    """The model takes one; the base takes as many as there are."""
    pipeline, request = flux(kontext), kontext.request(ask(64, 48, **guided()))
    references = [pipeline.reference(torch.rand(3, *size) * 2 - 1) for size in ((32, 64), (48, 16))]
    states = [pipeline.new_state(request, output, references) for output in range(len(request.seeds))]
    pipeline.condition(states, pipeline.encode_prompts(request, references), references)
    for state in states:
        assert state.context is not None
        assert state.context.equal(torch.cat([reference.tokens for reference in references]))
        for cond in state.cond.values():
            assert cond.row.lengths == (512, 4 * 3 + 2 * 4 + 3 * 1)
            expected = pipeline.transformer.rope(512, (3, 4), (2, 4), (3, 1))
            assert cond.constants["rope"][1].equal(expected)
    batch = assemble(states, LayoutCache("cpu"))
    assert pipeline.predict(batch).shape == batch["latents"].shape


@torch.inference_mode()
def test_a_picture_goes_along_as_tokens_that_no_step_changes(kontext: Model) -> None:
    runner, request = kontext.runner(), kontext.request(ask(96, seeds=(1, 2), **shown(131, 50)))
    prepared = runner.prepare(request)
    assert prepared.rows == (512 + 6 * 4 + 6 * 2,) * 2
    states = runner._held[request.id].states
    before = [state.context.clone() for state in states if state.context is not None]
    assert [context.shape for context in before] == [(6 * 2, 64)] * 2
    while not runner.step((request.id,)).progress[0].finished:
        pass
    for state, context in zip(states, before, strict=True):
        assert state.context is not None
        assert torch.equal(state.context, context)
        assert state.latents.shape == (6 * 4, 64)


@pytest.mark.parametrize(
    "shape", [(1024, 1024), (1920, 1080), (1, 3), (600, 601), (3000, 10), (1104, 944), (26, 24), (41, 26)]
)
def test_a_picture_gets_the_size_that_diffusers_gives_it(kontext: Model, shape: tuple[int, int]) -> None:
    assert list(SIZES) == pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    width, height = shape
    ratio = width / height
    _, *expected = min((abs(ratio - w / h), w, h) for w, h in SIZES)
    assert nearest_size(width, height, kontext.checkpoint.limits.size_multiple) == tuple(expected)


def test_an_edit_has_the_shape_of_its_picture_and_the_area_that_the_model_knows(kontext: Model) -> None:
    sizes = {(1920, 1080): (1360, 768), (100, 100): (1024, 1024), (768, 768): (1024, 1024), (3000, 10): (4096, 48)}
    for (width, height), expected in sizes.items():
        draft = Draft(model="tiny", prompt="x", **shown(width, height))
        request = kontext.request(draft)
        assert (request.width, request.height) == expected
    assert (kontext.request(dataclasses.replace(draft, width=64)).width) == 64


def test_one_picture_is_taken_and_more_are_refused(dev: Model, kontext: Model) -> None:
    one = shown(64, 64)
    two = {**one, "inputs": Inputs(images=one["inputs"].images * 2)}
    with pytest.raises(InvalidArgument, match="has 2 images; FluxKontextPipeline takes at most 1"):
        kontext.request(ask(**two))
    with pytest.raises(InvalidArgument, match="images: is required for IMAGE_EDIT"):
        kontext.request(ask(task=one["task"]))
    with pytest.raises(InvalidArgument, match="images: is not supported by FluxPipeline"):
        dev.request(ask(inputs=one["inputs"]))


# --- a sampler of second order ----------------------------------------------------------------------------------------


def levels(steps: int, tokens: int) -> Tensor:
    """Noise levels of FLUX.1-dev, the last one is 0: shifted by exp(mu), which is linear in the number of tokens."""
    shift = math.exp(0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256))
    sigma = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64)
    return torch.cat([shift * sigma / (1 + (shift - 1) * sigma), torch.zeros(1)]).float()


@torch.inference_mode()
def heun(model: Model, draft: Draft) -> Tensor:
    """diffusers' transformer, driven by diffusers' Heun, as FluxPipeline's loop would drive it: final latents."""
    pipeline, request = model.diffusers, model.request(draft)
    transformer: FluxTransformer2DModel = pipeline.transformer
    latents, image_ids = pipeline.prepare_latents(
        request.num_outputs, 16, request.height, request.width, torch.float32, torch.device("cpu"),
        [torch.Generator().manual_seed(seed) for seed in request.seeds],
    )  # fmt: skip
    prompts = [request.prompt] + [request.negative_prompt] * (request.negative_prompt is not None)
    texts = [pipeline.encode_prompt(prompt, num_images_per_prompt=request.num_outputs) for prompt in prompts]
    sigmas = levels(request.steps, latents.shape[1])
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(request.steps)
    assert len(scheduler.timesteps) == 2 * request.steps - 1
    scheduler.sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
    scheduler.timesteps = 1000 * torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2)])
    scheduler.set_begin_index(0)
    for timestep in scheduler.timesteps:
        cond, *uncond = (
            transformer(
                hidden_states=latents,
                timestep=timestep.expand(len(latents)) / 1000,
                guidance=torch.full([len(latents)], request.guidance.scale),
                pooled_projections=pooled,
                encoder_hidden_states=embeds,
                txt_ids=text_ids,
                img_ids=image_ids,
            ).sample
            for embeds, pooled, text_ids in texts
        )
        for other in uncond:
            cond = other + request.guidance.true_cfg_scale * (cond - other)
        latents = scheduler.step(cond, timestep, latents).prev_sample
    return latents


@pytest.mark.parametrize(
    "draft",
    [
        ask(scheduler=HEUN, steps=1),
        ask(96, scheduler=HEUN, steps=4, prompt=LONG, **scaled(7.0)),
        ask(48, 80, scheduler=HEUN, steps=3, seeds=(5, 9), **guided(scale=2.0, cfg=3.0)),
    ],
    ids=["one step", "scaled", "guided"],
)
def test_heun_is_that_of_diffusers(dev: Model, draft: Draft) -> None:
    (mine,) = dev.run(draft)
    close(mine.latents, heun(dev, draft), 1e-4)


def test_requests_of_unlike_samplers_and_steps_share_forwards(dev: Model) -> None:
    drafts = (
        ask(scheduler=HEUN, seeds=(1,), steps=3),
        ask(96, seeds=(2, 3), steps=4, **guided()),
        ask(64, 48, scheduler=HEUN, seeds=(4,), steps=5, **guided(cfg=4.0)),
        ask(seeds=(1,), steps=3),
    )
    together = dev.run(*drafts)
    for draft, result in zip(drafts, together, strict=True):
        (alone,) = dev.run(draft)
        close(result.latents, alone.latents)
    assert (together[0].latents - together[3].latents).abs().max() > 1e-3


@pytest.mark.parametrize(("scheduler", "evals"), [(HEUN, [2, 2, 1]), ("", [1, 1, 1])])
async def test_evaluations_are_told_step_by_step_and_in_all(dev: Model, scheduler: str, evals: list[int]) -> None:
    async with live(dev.checkpoint) as it:
        job = it.submit(ask(scheduler=scheduler, steps=3, seeds=(1, 2), **guided()))
        await ended(job)
        events = [entry.event for entry in job.entries]
        assert it.gates["step"].calls == sum(evals)
    assert [(e.step, e.total_steps, e.evals) for e in events if isinstance(e, StepProgress)] == [
        (step, 3, count) for step, count in enumerate(evals, 1)
    ]
    end = events[-1]
    assert isinstance(end, Completed)
    assert (end.effective.steps, end.effective.evals) == (3, sum(evals))
    assert end.effective.scheduler == (scheduler or "FlowMatchEulerDiscreteScheduler")


def test_a_scheduler_that_is_not_offered_is_refused_with_those_that_are(dev: Model) -> None:
    offered = "FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler"
    with pytest.raises(InvalidArgument, match=f"FluxPipeline has no 'Euler'; it has {offered}") as caught:
        dev.request(ask(scheduler="Euler"))
    assert [violation.field for violation in caught.value.violations] == ["sampling.scheduler"]


# --- the folder -------------------------------------------------------------------------------------------------------

RELEASED = {
    "attention_head_dim": 8, "guidance_embeds": True, "in_channels": 64, "joint_attention_dim": 64,
    "num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1, "patch_size": 1, "pooled_projection_dim": 32,
}  # fmt: skip
"""The keys of the published config of FLUX.1-dev: it is older than axes_dims_rope and out_channels."""


def test_the_config_of_the_released_model_is_enough() -> None:
    with torch.device("meta"):
        transformer = FluxTransformer.from_config(RELEASED)
    assert transformer.axes == (16, 56, 56)
    assert transformer.proj_out.out_features == 64


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"patch_size": 2}, "patch_size = 2 is not served"),
        ({"in_channels": 128, "out_channels": 64}, "in_channels = 128"),
    ],
)
def test_a_variant_that_is_not_served_is_refused_by_name(setting: dict[str, int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FluxTransformer.from_config(RELEASED | setting)


def test_sizes_follow_from_the_checkpoint(dev: Model) -> None:
    configs = dev.checkpoint.configs
    assert (dev.checkpoint.limits.size_multiple, dev.checkpoint.limits.min_size) == (16, 16)
    flatter = {**configs, "vae": {**configs["vae"], "block_out_channels": [8, 16]}}
    assert limits(flatter).size_multiple == kontext_limits(flatter).size_multiple == 4
