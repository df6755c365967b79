"""What Helios does that other models do not: videos in chunks, each of which goes by those before it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import HeliosTransformer3DModel
from torch import Tensor

from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.models.helios import HISTORY, SERVED, TRANSFORMER_WEIGHTS
from omni_grpc.models.helios.helios_transformer import HeliosTransformer
from omni_grpc.models.helios.pipeline_video import HeliosPipeline
from omni_grpc.nn.rows import MOD, LayoutCache, Rows
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.preview import latent_preview
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import CheckpointError, InternalError, InvalidArgument
from omni_grpc.types.events import (
    ArtifactReady,
    Completed,
    DecodeProgress,
    EncodeDone,
    Preempted,
    Started,
    StepProgress,
)
from omni_grpc.types.media import Inputs, Preview
from omni_grpc.types.request import Draft, Task
from omni_grpc.worker import media
from tests.models.cases.helios import ENTRIES, LONG, NEGATIVE, ask, moving
from tests.models.live import ended, live, seen
from tests.models.model import Model, latents

ENTRY = ENTRIES["HeliosPipeline"]
CHUNK_FRAMES = 33
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ENTRY.build(tmp_path_factory.mktemp("checkpoints") / "helios")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(ENTRY, folder)


@pytest.fixture(scope="module")
def native(model: Model) -> HeliosPipeline:
    assert isinstance(model.pipeline, HeliosPipeline)
    return model.pipeline


# --- parity -----------------------------------------------------------------------------------------------------------


def test_bfloat16_is_as_close_to_diffusers_as_its_rounding(folder: Path) -> None:
    model, draft = Model(ENTRY, folder, dtype="bfloat16"), ask(num_frames=66, negative_prompt=NEGATIVE)
    for block in model.diffusers.transformer.blocks:
        # it stays in float32 in diffusers, where keys of float32 and queries of bfloat16 then do not go together
        block.attn1.history_key_scale.data = block.attn1.history_key_scale.bfloat16()
    (mine,), theirs = model.run(draft), model.oracle(draft)
    assert mine.latents.dtype == torch.float32, "as the noise is drawn"
    assert (mine.latents - theirs.latents.float()).square().mean().sqrt() < 0.03


@pytest.mark.parametrize("changes", [{"is_amplify_history": False}, {"history_scale_mode": "scalar"}])
@torch.inference_mode()
def test_other_kinds_of_history_keys_are_those_of_diffusers(changes: dict[str, Any], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 48, "text_dim": 24}
    settings = {"rope_dim": (4, 6, 6), "freq_dim": 32, "is_amplify_history": True} | shape | changes
    torch.manual_seed(0)
    oracle = HeliosTransformer3DModel(**settings).eval()
    safetensors.torch.save_file(oracle.state_dict(), tmp_path / WEIGHT_FILE)
    with torch.device("meta"):
        mine = HeliosTransformer.from_config(dict(oracle.config) | {"patch_size": [1, 2, 2]})
    load_weights(mine, tmp_path, TRANSFORMER_WEIGHTS, device="cpu", dtype=torch.float32)

    height, width, frames = 3, 5, 9
    noise, first, last, text = (
        torch.randn(size, generator=generator)
        for size in ((16, frames, 6, 10), (16, 1, 6, 10), (16, sum(HISTORY.values()), 6, 10), (7, 24))
    )
    indices = torch.arange(29).split([1, *HISTORY.values(), frames])
    long, mid, near = last.split(list(HISTORY.values()), 1)
    expected = oracle(
        hidden_states=noise[None],
        timestep=torch.tensor([321.0]),
        encoder_hidden_states=text[None],
        indices_hidden_states=indices[4][None],
        indices_latents_history_short=torch.cat([indices[0], indices[3]])[None],
        indices_latents_history_mid=indices[2][None],
        indices_latents_history_long=indices[1][None],
        latents_history_short=torch.cat([first, near], 1)[None],
        latents_history_mid=mid[None],
        latents_history_long=long[None],
        return_dict=False,
    )[0][0]

    rows = Rows([(None, "cond")], [mine.row(len(text), height, width)], LayoutCache("cpu"))
    constants = mine.text(text) | mine.history(first, last) | mine.positions(height, width)
    for name, (stream, tensor) in constants.items():
        rows.bind(name, stream, [tensor])
    for name, table in mine.modulation(torch.tensor([321.0]), torch.float32).items():
        rows.bind(name, MOD, [table[0]])
    grid = Grid(frames=frames, height=height, width=width, patch=2)
    torch.testing.assert_close(grid.unpack(mine(grid.pack(noise), rows)), expected, atol=1e-5, rtol=0)


def test_what_is_cut_at_the_end_is_what_diffusers_cuts_and_is_said(model: Model) -> None:
    """Frames are 4 k + 1 in all, whatever the number of chunks."""
    runner, request = model.runner(), model.request(ask(16, 16, num_frames=4 * CHUNK_FRAMES, steps=1))
    runner.prepare(request)
    for _ in range(4):
        runner.step((request.id,))
    report = runner.decode(request.id)
    assert [shared.take(made.data) != b"" for made in report.media] == [True]
    assert report.media[0].num_frames == 129
    assert [(it.code, it.field, it.requested, it.applied) for it in report.warnings] == [
        ("FRAMES_ROUNDED", "num_frames", "132", "129")
    ]


# --- chunks -----------------------------------------------------------------------------------------------------------


Company = dict[str, tuple[int, Draft]]
"""Videos by name, and the tick at which each joins."""

COMPANY: Company = {
    "long": (0, ask(48, num_frames=99, negative_prompt=NEGATIVE, steps=2)),
    "pair": (1, ask(num_frames=66, seeds=(3, 4), prompt=LONG, steps=3)),
    "late": (3, ask(16, 64, num_frames=66, negative_prompt="", steps=1)),
    "short": (4, ask(steps=2)),
}
"""Of unlike sizes and lengths: they are in unlike chunks all along."""


def together(model: Model, company: Company) -> tuple[dict[str, Tensor], set[tuple[int, ...]]]:
    """The latents of every chunk of each, and which chunks shared steps."""
    runner = model.runner()
    running: list[str] = []
    shared: set[tuple[int, ...]] = set()
    for tick in itertools.count():
        for name, (at, draft) in company.items():
            if at == tick:
                runner.prepare(model.request(draft, name))
                running.append(name)
        report = runner.step(tuple(running))
        assert report.broken == ()
        shared.add(tuple(progress.segment for progress in report.progress))
        running = [progress.id for progress in report.progress if not progress.finished]
        if not running:
            break
    return {name: latents(held) for name, held in runner._held.items()}, shared


def test_videos_in_unlike_chunks_share_steps_and_get_what_each_gets_alone(model: Model) -> None:
    mixed, shared = together(model, COMPANY)
    assert {(1, 0), (1, 0, 0), (2, 1, 1, 0)} <= shared
    for name, (_, draft) in COMPANY.items():
        alone, _ = together(model, {name: (0, draft)})
        torch.testing.assert_close(mixed[name], alone[name], rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_a_chunk_goes_by_the_first_frame_of_all_and_the_last_ones(model: Model, native: HeliosPipeline) -> None:
    (state,) = native.prepare(model.request(ask(48, num_frames=99, steps=1)))
    assert (state.segments, state.first.abs().max(), state.last.abs().max()) == (3, 0, 0)
    made: list[Tensor] = []
    for _ in range(2):
        conds, noise = state.cond["cond"], state.latents
        outcome = native.advance(state, torch.zeros_like(state.latents))
        made.append(state.grid.unpack(outcome.latents))
        assert torch.equal(outcome.latents, noise), "a prediction of zero leaves the noise"
        assert (state.evaluation, state.schedule.steps) == (0, 1)
        assert torch.equal(state.first, made[0][:, :1])
        frames = torch.cat([torch.zeros_like(state.last), *made], 1)
        assert torch.equal(state.last, frames[:, -sum(HISTORY.values()) :])
        assert state.cond["cond"].constants["text_k"] is conds.constants["text_k"], "the text stays"
        assert state.cond["cond"].tables is conds.tables
        assert not torch.equal(state.cond["cond"].constants["short"][1], conds.constants["short"][1])
    assert state.segment == 2


def test_text_is_encoded_once_for_all_chunks_and_the_past_once_for_each(model: Model, native: HeliosPipeline) -> None:
    calls: list[str] = []
    watched = {"text": native.text_encoder.encoder, "past": native.transformer.patch_long}
    hooks = [module.register_forward_hook(lambda *_, name=name: calls.append(name)) for name, module in watched.items()]
    model.run(ask(num_frames=99, negative_prompt=NEGATIVE, steps=3))
    for hook in hooks:
        hook.remove()
    assert sorted(calls) == ["past"] * 3 + ["text"] * 2


@pytest.mark.parametrize("frames", [32, 34, 65, 0, 33 * 44 + 33])
def test_a_length_that_is_no_number_of_chunks_is_refused_with_the_nearest(model: Model, frames: int) -> None:
    nearest = min(max(round(frames / CHUNK_FRAMES), 1), 44) * CHUNK_FRAMES
    with pytest.raises(InvalidArgument, match=f"num_frames: {frames} .*nearest valid value: {nearest}"):
        model.request(ask(num_frames=frames))


# --- in the engine ----------------------------------------------------------------------------------------------------


def events(job: Any, *kinds: type) -> list[Any]:
    return [entry.event for entry in job.entries if isinstance(entry.event, kinds)]


async def test_a_chunk_is_decoded_while_the_next_one_takes_its_steps(model: Model) -> None:
    draft = ask(num_frames=99, steps=3, seeds=(1, 2))
    (expected,) = model.run(draft)
    async with live(model.checkpoint) as it:
        gate = it.hold("step", call=6)
        job = it.submit(draft)
        await gate.reached()
        # the last step of the second chunk is not over yet
        await seen(job, DecodeProgress)
        gate.open()
        await ended(job)
        assert job.state == "SUCCEEDED", job.failure
        (started,) = events(job, Started)
        assert started.total_steps == job.total_steps == 9
        steps = events(job, StepProgress)
        assert [(step.step, step.total_steps, step.segment, step.total_segments) for step in steps] == [
            (n + 1, 9, n // 3, 3) for n in range(9)
        ]
        both = events(job, StepProgress, DecodeProgress)
        assert [type(event) for event in both[:7]] == [StepProgress] * 5 + [DecodeProgress, StepProgress]
        assert (both[5].done_units, both[5].total_units) == (1, 3)
        (done,) = events(job, Completed)
        assert (done.effective.steps, done.effective.num_frames, done.stats.steps_run) == (3, 97, 9)
        assert [artifact.num_frames for artifact in job.artifacts] == [97, 97]
        decoded = sum(len(parts) for parts in it.latents.values())
        assert decoded == 6
        assert torch.equal(it.latents[job.id][-1], expected.latents[1].chunk(3)[2])
        await it.empty()


async def test_a_video_that_is_preempted_at_the_border_of_chunks_ends_as_if_it_had_been_alone(model: Model) -> None:
    long = ask(num_frames=99, steps=2, negative_prompt=NEGATIVE)
    short = ask(48, num_frames=66, steps=2, seeds=(2,))
    async with live(model.checkpoint, policy="priority", max_num_seqs=1) as it:
        gate = it.hold("step", call=2)
        low = it.submit(long)
        await gate.reached()
        high = it.submit(short, priority=5)
        await seen(high, EncodeDone)
        gate.open()
        await ended(low)
        assert [event.step for event in events(low, StepProgress)] == list(range(1, 7))
        (aside,) = events(low, Preempted)
        assert aside.completed_steps == 2, "with its first chunk"
        for draft, job in ((long, low), (short, high)):
            (alone,) = model.run(draft)
            torch.testing.assert_close(torch.cat(it.outcome(job)[0]), alone.latents[0], rtol=0, atol=TOLERANCE)
        await it.empty()


async def test_a_cancel_in_the_decode_of_a_chunk_leaves_nothing_and_the_neighbour_goes_on(model: Model) -> None:
    first, second = ask(num_frames=99, steps=2), ask(48, num_frames=66, steps=2, negative_prompt=NEGATIVE)
    async with live(model.checkpoint) as it:
        gate = it.hold("decode", call=1)
        job = it.submit(first)
        await gate.reached()
        neighbour = it.submit(second)
        await seen(neighbour, StepProgress)
        it.engine.cancel(job.id, "enough")
        assert job.state == "CANCELLED"
        count = job.last_seq
        gate.open()
        await ended(neighbour)
        (alone,) = model.run(second)
        torch.testing.assert_close(torch.cat(it.outcome(neighbour)[0]), alone.latents[0], rtol=0, atol=TOLERANCE)
        assert (job.last_seq, job.artifacts) == (count, ())
        await it.empty()


async def test_a_chunk_that_cannot_be_decoded_fails_its_video_alone(model: Model) -> None:
    bad, good = ask(48, num_frames=99, steps=2), ask(num_frames=66, steps=2)
    async with live(model.checkpoint) as it:
        decode = it.runner._pipeline.decode

        def fails(state: Any, latents: Tensor) -> Any:
            if state.request.width == 48:
                raise InternalError("no picture in it", reason="NOT_FINITE")
            return decode(state, latents)

        it.runner._pipeline.decode = fails  # type: ignore[method-assign]
        jobs = [it.submit(draft) for draft in (bad, good)]
        for job in jobs:
            await ended(job)
        assert [job.state for job in jobs] == ["FAILED", "SUCCEEDED"]
        assert (jobs[0].failure.reason, events(jobs[0], ArtifactReady)) == ("NOT_FINITE", [])
        (alone,) = model.run(good)
        torch.testing.assert_close(torch.cat(it.outcome(jobs[1])[0]), alone.latents[0], rtol=0, atol=TOLERANCE)
        await it.empty()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SERVED))
def test_a_variant_that_is_not_served_is_refused_by_name(native: HeliosPipeline, name: str) -> None:
    other = {"patch_size": [2, 2, 2], "qk_norm": None, "added_kv_proj_dim": 64}.get(name, False)
    configs = native.checkpoint.configs
    with pytest.raises(CheckpointError, match=rf"{name} = .* is not served yet"):
        native.checkpoint.spec.variant({**configs, "transformer": {**configs["transformer"], name: other}})


def test_a_video_to_go_on_from_must_fill_a_chunk(model: Model) -> None:
    draft = ask(task=Task.VIDEO_TO_VIDEO, inputs=Inputs(source_video=moving(32, 32, CHUNK_FRAMES - 1)))
    with pytest.raises(InvalidArgument, match="source_video: has 32 frames; Helios goes by 33 at least") as caught:
        model.pipeline.prepare(model.request(draft))
    assert [violation.field for violation in caught.value.violations] == ["source_video"]


def test_a_preview_is_the_middle_of_the_chunk(model: Model) -> None:
    asked = Preview(max_edge_px=64)
    runner, request = model.runner(), model.request(ask(48, 32, num_frames=66, steps=1, preview=asked))
    runner.prepare(request)
    (progress,) = runner.step((request.id,)).progress
    (preview,) = progress.previews
    assert (preview.width, preview.height) == (64, 43)
    held = runner._held[request.id]
    chunk = held.states[0].grid.unpack(held.finished[0][0])
    picture = media.fit(latent_preview(chunk[:, 4], None), 64)
    assert preview.data == media.encode(picture, asked.format, preview=True)
    assert not np.array_equal(picture, media.fit(latent_preview(chunk[:, 3], None), 64))
