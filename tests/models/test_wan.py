"""What Wan does that other models do not. What all of them do is in test_conformance.py."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig, LimitsConfig
from omni_grpc.models.wan import variant
from omni_grpc.models.wan.pipeline_text_to_video import WanPipeline
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import LayoutCache, Rows
from omni_grpc.pipeline.batch import advance, assemble, predict
from omni_grpc.pipeline.state import State
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import CheckpointError, ConfigError
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import GuidanceDraft
from omni_grpc.types.spec import Checkpoint
from tests.models.cases import ENTRIES, LONG
from tests.models.cases.wan import ask, guided, shown, wan
from tests.models.model import NAME, Entry, Model
from tools.tiny_checkpoints import BUILDERS

EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by the name of its builder, built once."""
    return functools.cache(lambda name: BUILDERS[name](tmp_path_factory.mktemp("tiny") / name))


@pytest.fixture(scope="module")
def model(folders: Callable[[str], Path]) -> Model:
    return Model(ENTRIES["WanPipeline"], folders("wan_t2v"))


@pytest.fixture(scope="module")
def pipeline(model: Model) -> WanPipeline:
    assert isinstance(model.pipeline, WanPipeline)
    return model.pipeline


def stepped(model: Model, states: list[State], steps: int) -> None:
    """Takes so many steps of each state, all together."""
    for _ in range(steps):
        predictions = predict(model.pipeline, assemble(states, LayoutCache("cpu")))
        for state in states:
            advance(model.pipeline, state, predictions[state])


# --- members of the family that need no entry of their own -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("wan_single", [ask(48, 64, 9, steps=3, **guided(5.0)), ask(steps=4)]),
        ("wan_ti2v_i2v", [ask(64, 32, 9, steps=3, **shown(), **guided(5.0))]),
    ],
)
def test_members_with_one_transformer_match_diffusers(name: str, drafts: list[Any], folders: Any) -> None:
    """Wan2.1 under Euler; TI2V under the class in which diffusers makes videos of pictures."""
    model = Model(Entry(build=BUILDERS[name], oracle=wan, drafts=tuple(drafts)), folders(name))
    for draft in drafts:
        (mine,), theirs = model.run(draft), model.oracle(draft)
        latents, pixels = mine.differs_from(theirs)
        assert latents < 1e-4
        assert pixels <= 1
        assert mine.images[0].std() > 1


@pytest.mark.parametrize("change", [{"image_dim": 1280}, {"added_kv_proj_dim": 64}, {"cross_attn_norm": False}])
def test_members_that_are_not_served_run_through_diffusers(
    change: Mapping[str, Any], tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    folder = edited(folders("wan_t2v"), tmp_path, "transformer", change)
    (key, value), *_ = change.items()
    assert open_checkpoint(folder).spec.family == "diffusers"
    with pytest.raises(CheckpointError, match=f"transformer: {key} = {value} is not served yet"):
        open_checkpoint(folder, load_format="native")


def test_a_boundary_without_a_second_expert_is_refused(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    folder = edited(folders("wan_single"), tmp_path, "", {"boundary_ratio": 0.5})
    with pytest.raises(CheckpointError, match="no transformer_2"):
        open_checkpoint(folder, load_format="native")


def test_a_checkpoint_without_its_first_transformer_is_refused(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    folder = edited(folders("wan_t2v"), tmp_path, "", {"transformer": [None, None]})
    with pytest.raises(CheckpointError, match=r"model_index\.json names no transformer"):
        open_checkpoint(folder, load_format="native")


def edited(folder: Path, into: Path, component: str, change: Mapping[str, Any]) -> Path:
    """A folder of links to a checkpoint, with one config changed."""
    import json

    for file in folder.rglob("*"):
        if file.is_file():
            link = into / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    config = into / component / ("config.json" if component else "model_index.json")
    content = json.loads(config.read_text()) | change
    config.unlink()
    config.write_text(json.dumps(content))
    return into


# --- two experts ------------------------------------------------------------------------------------------------------


def seen_by(pipeline: WanPipeline) -> tuple[dict[str, list[tuple[str, ...]]], list[Any]]:
    """What rows each expert's stack gets from now on, by request; and the hooks that write it down."""
    rows: dict[str, list[tuple[str, ...]]] = {name: [] for name in EXPERTS}

    def note(name: str, stack: Any, arguments: tuple[Any, ...]) -> None:
        batch: Rows = arguments[1]
        rows[name].append(tuple(state.request.id for state, _ in batch.owners))

    hooks = [pipeline.experts[name].stack.register_forward_pre_hook(functools.partial(note, name)) for name in EXPERTS]
    return rows, hooks


@torch.inference_mode()
def test_each_expert_gets_the_rows_whose_turn_it_is(model: Model, pipeline: WanPipeline) -> None:
    """Timesteps of four steps: 999, 900, 750, 500. The boundary is at 875, or where a request wants it."""
    drafts = {"usual": ask(steps=4, **guided()), "late": ask(48, 32, 9, steps=4, guidance=boundary(0.6))}
    drafts["never"] = ask(32, 32, 1, steps=4, guidance=boundary(0.0))
    states = [s for name, draft in drafts.items() for s in pipeline.prepare(model.request(draft, name))]
    assert states[0].schedule.timesteps == (999, 900, 750, 500)
    rows, hooks = seen_by(pipeline)
    stepped(model, states, 4)
    for hook in hooks:
        hook.remove()
    both = ("usual", "usual", "late", "never")
    assert rows == {
        "transformer": [both, both, ("late", "never"), ("never",)],
        "transformer_2": [("usual", "usual"), ("usual", "usual", "late")],
    }
    for state, (name, draft) in zip(states, drafts.items(), strict=True):
        (alone,) = model.run(draft)
        torch.testing.assert_close(state.latents, alone.latents[0], rtol=0, atol=1e-5, msg=name)


def boundary(ratio: float) -> GuidanceDraft:
    return GuidanceDraft(boundary_ratio=ratio, true_cfg_scale=1.0)


@torch.inference_mode()
def test_the_scale_changes_with_the_expert(model: Model, pipeline: WanPipeline) -> None:
    (state,) = pipeline.prepare(model.request(ask(steps=4, **guided(5.0, 2.0))))
    scales = []
    for _ in range(4):
        scales.append(pipeline.guidance(state).true_cfg_scale)
        stepped(model, [state], 1)
    assert scales == [5.0, 5.0, 2.0, 2.0]


@torch.inference_mode()
def test_texts_become_keys_and_values_once_for_each_expert_that_has_steps(model: Model, pipeline: WanPipeline) -> None:
    calls: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in pipeline.named_modules()
        if isinstance(module, Linear) and module.stream in ("txt", "mod")
    ]
    states = pipeline.prepare(model.request(ask(steps=4, seeds=(1, 2), **guided())))
    first = pipeline.experts["transformer"]
    per_text, per_schedule = 2 + len(first.stack), 3
    assert len(calls) == len(EXPERTS) * (2 * per_text + per_schedule)
    assert {name.split(".")[1] for name in calls} == set(EXPERTS)
    stepped(model, states, 4)
    assert len(calls) == len(EXPERTS) * (2 * per_text + per_schedule), "steps read what was prepared"
    calls.clear()
    pipeline.prepare(model.request(ask(steps=4, guidance=boundary(0.0))))
    assert {name.split(".")[1] for name in calls} == {"transformer"}, "the other one has no steps"
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def test_what_an_expert_needs_is_forgotten_after_its_last_step(model: Model, pipeline: WanPipeline) -> None:
    (state,) = pipeline.prepare(model.request(ask(steps=4)))
    first, second = state.cond["cond"], state.pending["transformer_2"]["cond"]
    stepped(model, [state], 2)
    assert state.cond["cond"] is second
    assert not state.pending
    assert not torch.equal(first.constants["text_k"][1], second.constants["text_k"][1])


@torch.inference_mode()
def test_modulation_is_kept_once_for_all_blocks(model: Model, pipeline: WanPipeline) -> None:
    (state,) = pipeline.prepare(model.request(ask(steps=4)))
    assert {name: tuple(table.shape) for name, table in state.cond["cond"].tables.items()} == {
        "blocks": (4, 1, 1, 6 * 64),
        "final": (4, 1, 2 * 64),
    }


# --- precision --------------------------------------------------------------------------------------------------------


def test_bfloat16_is_as_close_to_diffusers_as_its_rounding(folders: Callable[[str], Path]) -> None:
    draft = ask(48, 64, 9, prompt=LONG, steps=4, **guided())
    entry = ENTRIES["WanPipeline"]
    narrow, wide = (Model(entry, folders("wan_t2v"), dtype=dtype) for dtype in ("bfloat16", "float32"))
    kept = {
        name.rpartition(".")[2] for name, p in narrow.pipeline.experts.named_parameters() if p.dtype != torch.bfloat16
    }
    assert kept == {"scale_shift_table", "weight", "bias"}
    assert {
        name.split(".")[-2]
        for name, p in narrow.pipeline.experts.named_parameters()
        if p.dtype is torch.float32 and not name.endswith("table")
    } == {"norm2", "linear_1", "linear_2"}
    (mine,), theirs, (exact,) = narrow.run(draft), narrow.oracle(draft), wide.run(draft)
    assert mine.latents.dtype == torch.float32, "latents and the sampler stay in float32"

    def distance(one: Tensor, other: Tensor) -> float:
        return (one - other).square().mean().sqrt().item()

    assert distance(mine.latents, theirs.latents) < 2 * distance(theirs.latents, exact.latents) < 0.05


def test_rope_tables_are_those_of_diffusers(pipeline: WanPipeline) -> None:
    transformer = pipeline.experts["transformer"]
    oracle = WanRotaryPosEmbed(16, (1, 2, 2), 1024)
    for frames, height, width in ((1, 1, 1), (3, 2, 5), (21, 4, 3)):
        cos, sin = oracle(torch.zeros(1, 1, frames, 2 * height, 2 * width))
        expected = torch.stack([cos[0, :, 0, ::2], sin[0, :, 0, 1::2]], -1)
        torch.testing.assert_close(transformer.rope(frames, height, width), expected, rtol=0, atol=1e-6)


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "dropped"), [(511, 0), (512, 1), (700, 189)])
def test_tokens_that_do_not_fit_are_cut_like_in_diffusers_and_counted(model: Model, words: int, dropped: int) -> None:
    """Of 512 tokens, the last one is the end."""
    draft = ask(32, 32, 1, prompt="cat " * words, negative_prompt="a " * 520, steps=1)
    (state,) = model.pipeline.prepare(model.request(draft))
    assert state.prompt_tokens == min(words + 1, 512)
    assert state.dropped_tokens == ({"prompt": dropped} if dropped else {}) | {"negative_prompt": 9}
    (mine,) = model.run(draft)
    assert mine.differs_from(model.oracle(draft))[0] < 1e-4


# --- frames -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_one_request_is_encoded_while_another_is_decoded(model: Model, pipeline: WanPipeline) -> None:
    """The VAE keeps frames in its attributes between its chunks. Here each waits for the other before every chunk."""
    vae, barrier = pipeline.vae, threading.Barrier(2, timeout=20)
    video, latents = torch.randn(3, 9, 32, 32).clamp(-1, 1), torch.randn(16, 3, 4, 4)
    expected = vae.encode(video), vae.decode(latents)
    hooks = [
        part.register_forward_pre_hook(lambda *_: (barrier.wait(), None)[1])
        for part in (vae.module.encoder, vae.module.decoder)
    ]
    results: dict[str, Tensor] = {}

    @torch.inference_mode()
    def encode() -> None:
        results["encoded"] = vae.encode(video)

    thread = threading.Thread(target=encode)
    thread.start()
    decoded = vae.decode(latents)
    thread.join()
    for hook in hooks:
        hook.remove()
    assert torch.equal(results["encoded"], expected[0])
    assert torch.equal(decoded, expected[1])


@torch.inference_mode()
def test_a_first_frame_is_in_the_video_of_ti2v_as_it_was_encoded(folders: Callable[[str], Path]) -> None:
    model = Model(ENTRIES["WanPipeline-ti2v"], folders("wan_ti2v"))
    with_frame, without = ask(64, 32, 9, steps=2, **shown()), ask(64, 32, 9, steps=2)
    (state,), (free,) = (model.pipeline.prepare(model.request(draft)) for draft in (with_frame, without))
    assert state.cond["cond"].row.streams[1] == ("img", ((0, 4), (1, 2)))
    assert free.cond["cond"].row.streams[1] == ("img", ((0, 6),))
    assert torch.equal(state.latents, free.latents[2:]), "the same noise for the frames that are denoised"
    context = state.context.clone()
    stepped(model, [state, free], 2)
    assert torch.equal(state.context, context)
    video = model.pipeline.decode(state, state.latents)[0].pixels
    assert video.shape == (9, 32, 64, 3)
    first = model.pipeline.vae.decode(dataclasses.replace(state.grid, frames=1).unpack(context))
    alone = ((first[0] / 2 + 0.5).clamp(0, 1) * 255).round().movedim(0, -1)
    assert np.abs(video[0].astype(int) - alone.numpy()).max() <= 1


def facts(checkpoint: Checkpoint) -> ServingFacts:
    return ServingFacts(checkpoint, LimitsConfig())


@pytest.mark.parametrize(
    ("name", "draft", "message"),
    [
        (
            "wan_i2v",
            ask(32, 32, 1, **shown()),
            "num_frames: 1 leaves no frames to generate besides first_frame.*value: 5",
        ),
        ("wan_i2v", ask(32, 32, 5), "does not support TEXT_TO_VIDEO"),
        ("wan_ti2v", ask(32, 32, 5, **shown(last=True)), "last_frame: is not supported by WanPipeline"),
        ("wan_t2v", ask(32, 32, 5, **shown()), "does not support IMAGE_TO_VIDEO"),
        ("wan_t2v", ask(32, 32, 5, fps=30.0), "fps: is not supported by WanPipeline"),
        ("wan_t2v", ask(32, 32, 5, guidance=boundary(1.5)), "boundary_ratio: 1.5 is outside 0..1"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, draft: Any, message: str, folders: Callable[[str], Path]) -> None:
    with pytest.raises(Exception, match=message):
        resolve_request(draft, facts(open_checkpoint(folders(name), name=NAME)), id="job")


def test_a_video_has_the_shape_of_its_first_frame_and_the_usual_number_of_pixels(
    folders: Callable[[str], Path],
) -> None:
    checkpoint = open_checkpoint(folders("wan_i2v"), name=NAME)
    for (width, height), expected in {(1200, 2400): (432, 880), (50, 37): (720, 528)}.items():
        picture = ImageInput(width, height, 3, bytes(3 * width * height))
        draft = dataclasses.replace(ask(**shown()), width=None, height=None, inputs=Inputs(first_frame=picture))
        request = resolve_request(draft, facts(checkpoint), id="job").request
        assert (request.width, request.height) == expected


def test_defaults_are_those_of_the_released_models(folders: Callable[[str], Path]) -> None:
    found = {name: open_checkpoint(folders(name)).defaults for name in ("wan_t2v", "wan_i2v", "wan_ti2v", "wan_single")}
    guidance = {
        name: (it.guidance.true_cfg_scale, it.guidance.scale_low_noise, it.guidance.boundary_ratio)
        for name, it in found.items()
    }
    assert guidance == {
        "wan_t2v": (4.0, 3.0, 0.875),
        "wan_i2v": (3.5, 3.5, 0.9),
        "wan_ti2v": (5.0, None, None),
        "wan_single": (5.0, None, None),
    }
    assert [(it.width, it.height, it.num_frames, it.fps, it.steps) for it in found.values()] == [
        (832, 480, 81, 16, 40), (832, 480, 81, 16, 40), (1280, 704, 121, 24, 50), (832, 480, 81, 16, 50),
    ]  # fmt: skip
    multiples = [open_checkpoint(folders(name)).limits.size_multiple for name in ("wan_t2v", "wan_ti2v")]
    assert multiples == [16, 32]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_the_server_stand_in_for_the_checkpoints_own(folders: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folders("wan_t2v"), name=NAME)
    config = EngineConfig.from_settings(model="x", boundary_ratio=0.5, flow_shift=8.0)
    changed = apply_settings(config, checkpoint)
    model = Model(ENTRIES["WanPipeline"], folders("wan_t2v"), checkpoint=changed)
    request = model.request(ask(steps=4))
    assert request.guidance.boundary_ratio == 0.5
    (state,) = model.pipeline.prepare(request)
    assert state.schedule.timesteps == (999, 960, 889, 728)
    assert not state.pending, "0.5 lies below all of them"
    scheduler = model.diffusers.scheduler
    model.diffusers.scheduler = type(scheduler).from_config(scheduler.config, flow_shift=8.0)
    draft = ask(steps=3, **guided())
    assert model.run(draft)[0].differs_from(model.oracle(draft))[0] < 1e-4
    assert checkpoint.configs["scheduler"]["flow_shift"] == 3.0


@pytest.mark.parametrize(
    ("name", "field", "value"), [("wan_ti2v", "boundary_ratio", 0.5), ("wan_t2v", "allow_attention_fallback", True)]
)
def test_a_setting_that_would_change_nothing_is_refused(
    name: str, field: str, value: Any, folders: Callable[[str], Path]
) -> None:
    config = EngineConfig.from_settings(model="x", **{field: value})
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} has no effect on WanPipeline"):
        apply_settings(config, open_checkpoint(folders(name)))


def test_a_shift_is_put_where_eulers_config_has_it(folders: Callable[[str], Path]) -> None:
    config = EngineConfig.from_settings(model="x", flow_shift=9.0)
    changed = apply_settings(config, open_checkpoint(folders("wan_single")))
    assert changed.configs["scheduler"]["shift"] == 9.0


def test_wan21_has_what_tea_cache_was_fitted_to_and_later_ones_have_not() -> None:
    """The coefficients are those of the modulation by the timestep, of one denoiser alone."""
    configs: dict[str, dict[str, Any]] = {
        "": {},
        "transformer": {"num_layers": 30, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads"},
        "vae": {},
        "scheduler": {},
    }
    small = variant(configs)["step_cache"]["tea_cache"]
    assert small["signal"] == "timestep"
    assert small["coefficients"][0] == pytest.approx(-52186.24, rel=1e-6)
    large = {**configs, "transformer": {**configs["transformer"], "num_layers": 40}}
    assert variant(large)["step_cache"]["tea_cache"]["coefficients"][0] == pytest.approx(-303318.7, rel=1e-6)
    for other in (
        {**large, "transformer_2": large["transformer"]},
        {**configs, "": {"expand_timesteps": True}},
        {**configs, "transformer": {**configs["transformer"], "num_layers": 2}},
    ):
        assert "step_cache" not in variant(other)
