"""What every registered model has to do, on its tiny checkpoint. A new model needs an entry in cases/, no test."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
import itertools
import pickle
from collections.abc import Callable, Mapping

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

from omni_grpc.checkpoint.registry import specs
from omni_grpc.nn.rows import LayoutCache, Rows
from omni_grpc.pipeline.base import Finished as DoneOutcome
from omni_grpc.pipeline.batch import assemble, predict
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.state import State
from omni_grpc.resolve.frames import segments
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.events import ArtifactReady, Cancelled, Completed, EncodeDone, Preempted, Resumed, StepProgress
from omni_grpc.types.media import Preview
from omni_grpc.types.plan import CostModel
from omni_grpc.types.request import Draft, GuidanceDraft, GuidanceNorm, Request
from omni_grpc.types.spec import GuidanceKind
from omni_grpc.worker.delivery import encode
from tests.models.cases import ENTRIES, pipeline_of
from tests.models.live import ended, live, seen
from tests.models.model import Model, label, latents, shape

pytestmark = pytest.mark.conformance

TOLERANCE = 1e-5
"""How far a float32 result may be from itself in other company."""

GUIDED = sorted(name for name, entry in ENTRIES.items() if any(draft.negative_prompt for draft in entry.drafts))


def test_every_registered_model_is_tested() -> None:
    assert set(specs()) == {pipeline_of(name) for name in ENTRIES}, "each spec needs an entry in tests/models/cases"


@pytest.fixture(scope="session")
def served() -> dict[str, str]:
    """Our pipeline class -> the checkpoint that engines are started with."""
    return {}


@pytest.fixture(scope="module")
def one_per_pipeline(model: Model, served: dict[str, str]) -> None:
    """Lets a test run on one kind of checkpoint of each pipeline class: to an engine they are the same."""
    mine = str(model.checkpoint.path)
    if served.setdefault(model.spec.pipeline, mine) != mine:
        pytest.skip(f"{model.spec.pipeline} is tried on another checkpoint")


engine = pytest.mark.usefixtures("one_per_pipeline")


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)


# --- parity with diffusers --------------------------------------------------------------------------------------------

PARITY = [
    pytest.param(name, draft, id=f"{name}-{label(draft)}") for name in sorted(ENTRIES) for draft in ENTRIES[name].drafts
]


@pytest.mark.shows("the model", "diffusers, latents and images", "1e-4; 1 of 255")
@pytest.mark.parametrize(("model", "draft"), PARITY, indirect=["model"])
def test_latents_and_images_are_those_of_diffusers(model: Model, draft: Draft) -> None:
    (mine,), theirs = model.run(draft), model.oracle(draft)
    assert mine.latents.shape == theirs.latents.shape
    assert [image.shape[-3:] for image in mine.images] == [(draft.height, draft.width, 3)] * len(draft.seeds)
    assert [image.shape for image in mine.images] == [image.shape for image in theirs.images]
    assert all(image.std() > 1 for image in mine.images)
    latents, pixels = mine.differs_from(theirs)
    assert latents < 1e-4
    assert pixels <= 1


# --- company ----------------------------------------------------------------------------------------------------------


LEAVES = 2
"""The tick before which the leaver is dropped."""


def company(model: Model) -> list[tuple[int, Request]]:
    """Unlike sizes, lengths, numbers of steps and kinds of guidance, each with the tick at which it joins; one leaves
    early.
    """
    drafts = {
        "plain": (0, model.draft(steps=5, seeds=(1,))),
        "leaver": (0, model.guided(wider=1, steps=6, seeds=(6,))),
        "pair": (0, model.guided(wider=2, longer=1, steps=2, seeds=(2, 3))),
        "weak": (1, model.guided(higher=1, steps=4, seeds=(4,), scale=2.0, prompt="a lake")),
        "late": (2, model.draft(wider=2, longer=2, steps=3, seeds=(5,), prompt="two blue squares left of a star")),
    }
    return [(tick, model.request(draft, name)) for name, (tick, draft) in drafts.items()]


def mix(model: Model) -> dict[str, Tensor]:
    """Runs the company until everybody who stays is done: id -> latents."""
    runner, joins = model.runner(), company(model)
    running: list[str] = []
    taken: dict[str, list[int]] = {}
    for tick in itertools.count():
        for request in [request for at, request in joins if at == tick]:
            runner.prepare(request)
            running.append(request.id)
        if tick == LEAVES:
            runner.drop(("leaver",))
            running.remove("leaver")
        report = runner.step(tuple(running))
        assert report.broken == ()
        for progress in report.progress:
            taken.setdefault(progress.id, []).append(progress.step)
        running = [progress.id for progress in report.progress if not progress.finished]
        if not running:
            break
    limits = model.checkpoint.limits
    steps = {request.id: request.steps * segments(request.num_frames, limits) for _, request in joins}
    assert taken == {name: list(range(1, 1 + count)) for name, count in (steps | {"leaver": LEAVES}).items()}
    return {name: latents(held) for name, held in runner._held.items()}


@pytest.fixture(scope="module")
def together(model: Model) -> dict[str, Tensor]:
    return mix(model)


@pytest.mark.shows("shared steps", "each request alone", "1e-5")
def test_requests_that_share_steps_get_what_each_gets_alone(model: Model, together: dict[str, Tensor]) -> None:
    assert sorted(together) == ["late", "pair", "plain", "weak"]
    for request in [request for _, request in company(model) if request.id in together]:
        (alone,) = model.run_requests(request)
        close(together[request.id], alone.latents)


@pytest.mark.shows("shared steps", "the same batch again", "bit for bit")
def test_the_same_company_again_is_equal_bit_for_bit(model: Model, together: dict[str, Tensor]) -> None:
    again = mix(model)
    assert all(torch.equal(again[name], latents) for name, latents in together.items())


# --- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.shows("seeds", "the same seed again; output i made alone", "bit for bit; 1e-5")
def test_a_seed_is_an_image(model: Model) -> None:
    draft = model.guided(seeds=(40,), num_outputs=3)
    (three,), (again,) = model.run(draft), model.run(draft)
    assert torch.equal(three.latents, again.latents)
    assert all(np.array_equal(one, other) for one, other in zip(three.images, again.images, strict=True))
    for output in range(3):
        (alone,) = model.run(model.guided(seeds=(40 + output,)))
        close(alone.latents[0], three.latents[output])
    for one, other in itertools.combinations(range(3), 2):
        assert (three.latents[one] - three.latents[other]).abs().max() > 0.1
        assert not np.array_equal(three.images[one], three.images[other])


def test_seeds_are_used_in_the_order_in_which_they_are_given(model: Model) -> None:
    (given,), (turned,) = model.run(model.draft(seeds=(9, 3))), model.run(model.draft(seeds=(3, 9)))
    close(given.latents, turned.latents.flip(0))


# --- cancel -----------------------------------------------------------------------------------------------------------


Outcome = tuple[list[Tensor], list[bytes]]
"""Final latents and files."""


def unwanted(model: Model) -> Draft:
    return model.guided(steps=3, seeds=(1, 2), output_format=model.lossless)


@pytest.fixture(scope="module")
def fresh(model: Model) -> Outcome:
    """What a fresh engine makes of it, where nothing was cancelled."""

    async def make() -> Outcome:
        async with live(model.checkpoint) as it:
            return await it.result(unwanted(model))

    return asyncio.run(make())


@pytest.mark.shows("cancel in any phase", "what a fresh engine makes next", "bit for bit")
@engine
@pytest.mark.parametrize("phase", ["queue", "prepare", "step", "decode"])
async def test_a_cancelled_request_leaves_nothing_behind(model: Model, fresh: Outcome, phase: str) -> None:
    draft = unwanted(model)
    async with live(model.checkpoint, max_num_seqs=1) as it:
        gate = it.hold("step" if phase == "queue" else phase, call=2 if phase == "step" else 1)
        first = it.submit(draft)
        await gate.reached()
        cancelled = it.submit(model.draft()) if phase == "queue" else first
        it.engine.cancel(cancelled.id, "not wanted")
        assert cancelled.state == "CANCELLED", "before the work in hand ends"
        end = cancelled.entries[-1].event
        assert isinstance(end, Cancelled)
        assert end.completed_steps == {"step": 1, "decode": 3}.get(phase, 0)
        events = len(cancelled.entries)
        gate.open()
        if phase == "queue":
            await ended(first)
            assert_equal_bit_for_bit(it.outcome(first), fresh)
        await it.empty()
        assert it.gates["step"].calls == {"prepare": 0, "step": 2}.get(phase, 3)
        assert it.gates["prepare"].calls == 1
        assert_equal_bit_for_bit(await it.result(draft), fresh)
        await it.empty()
        assert len(cancelled.entries) == events


def assert_equal_bit_for_bit(mine: Outcome, theirs: Outcome) -> None:
    assert [torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True)] == [True] * len(theirs[0])
    assert mine[1] == theirs[1]


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.shows("preemption", "the request alone", "1e-5")
@engine
async def test_a_preempted_request_ends_as_if_it_had_been_alone(model: Model) -> None:
    long, short = model.guided(steps=12, seeds=(1,)), model.draft(wider=1, steps=2, seeds=(2,))
    async with live(model.checkpoint, policy="priority", max_num_seqs=1) as it:
        gate = it.hold("step", call=4)
        low = it.submit(long)
        await gate.reached()
        high = it.submit(short, priority=5)
        await seen(high, EncodeDone)
        gate.open()
        await ended(low)
        events = [entry.event for entry in low.entries]
        assert [event.step for event in events if isinstance(event, StepProgress)] == list(range(1, 13))
        assert [type(event) for event in events if isinstance(event, Preempted | Resumed)] == [Preempted, Resumed]
        (aside,) = (event for event in events if isinstance(event, Preempted))
        assert aside.completed_steps == 4
        assert high.record.end_time < low.record.end_time
        for draft, job in ((long, low), (short, high)):
            (alone,) = model.run(draft)
            close(torch.stack(it.outcome(job)[0]), alone.latents)


# --- guidance ---------------------------------------------------------------------------------------------------------

SCALE, RESCALE, START, END = 10.0, 0.7, 0.25, 0.75


def plain(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    return uncond + scale * (cond - uncond)


def lengths(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """How much longer, token by token, the conditional prediction is than the guided one."""
    guided = plain(cond, uncond, scale)
    return cond.square().sum(-1, keepdim=True).sqrt() / guided.square().sum(-1, keepdim=True).sqrt()


def rescaled(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    guided = plain(cond, uncond, scale)
    return RESCALE * (guided * cond.std() / guided.std()) + (1 - RESCALE) * guided


Formula = Callable[[Tensor, Tensor, float], Tensor]
KINDS: Mapping[str, tuple[GuidanceDraft, Formula]] = {
    "plain": (GuidanceDraft(norm=GuidanceNorm.NONE), plain),
    "renorm": (GuidanceDraft(norm=GuidanceNorm.RENORM), lambda *given: plain(*given) * lengths(*given)),
    "clipped": (
        GuidanceDraft(norm=GuidanceNorm.RENORM_CLIPPED),
        lambda *given: plain(*given) * lengths(*given).clamp(max=1),
    ),
    "rescale": (GuidanceDraft(norm=GuidanceNorm.NONE, rescale=RESCALE), rescaled),
    "interval": (GuidanceDraft(norm=GuidanceNorm.NONE, interval_start=START, interval_end=END), plain),
}


@torch.inference_mode()
def by_hand(model: Model, drafts: Mapping[str, Draft]) -> dict[str, Tensor]:
    """The latents of runs of four steps whose predictions are combined here, in float64."""
    states = {kind: model.pipeline.prepare(model.request(draft))[0] for kind, draft in drafts.items()}
    layouts, done = LayoutCache("cpu"), False
    while not done:
        predictions = predict(model.pipeline, assemble(list(states.values()), layouts))
        for kind, state in states.items():
            branches = predictions[state]
            prediction = branches["cond"]
            if kind != "interval" or state.index in (1, 2):
                # not SCALE where the model writes guidance otherwise
                scale = model.pipeline.guidance(state).true_cfg_scale
                prediction = KINDS[kind][1](branches["cond"].double(), branches["uncond"].double(), scale).float()
            else:
                assert branches.keys() == {"cond"}
            done = isinstance(model.pipeline.advance(state, prediction), DoneOutcome)
    return {kind: state.latents for kind, state in states.items()}


@pytest.mark.shows("guidance: norms, rescale, interval", "its formula on two predictions", "1e-4")
@pytest.mark.parametrize("model", GUIDED, indirect=True)
def test_guidance_is_its_formula_on_the_two_predictions(model: Model) -> None:
    drafts = {
        kind: model.draft(steps=4, negative_prompt="", guidance=dataclasses.replace(asked, true_cfg_scale=SCALE))
        for kind, (asked, _) in KINDS.items()
    }
    results = model.run(*drafts.values(), model.draft(steps=4))
    got = {kind: result.latents[0] for kind, result in zip([*drafts, "off"], results, strict=True)}
    for kind, expected in by_hand(model, drafts).items():
        # rounding is multiplied by the scale
        torch.testing.assert_close(got[kind], expected, rtol=0, atol=SCALE * TOLERANCE)
        others = {"off", "renorm" if kind == "plain" else "plain"}
        assert all((got[kind] - got[other]).abs().max() > 1e-3 for other in others), kind


# --- what must change nothing -----------------------------------------------------------------------------------------


@pytest.mark.shows("previews", "without them", "bit for bit")
def test_previews_change_nothing(model: Model) -> None:
    drafts = [model.guided(steps=3, seeds=(1, 2), preview=asked) for asked in (None, Preview(max_edge_px=64))]
    (without,), (watched,) = (model.run(draft) for draft in drafts)
    assert torch.equal(without.latents, watched.latents)
    runner, request = model.runner(), model.request(drafts[1])
    runner.prepare(request)
    for _ in range(3):
        (progress,) = runner.step((request.id,)).progress
        assert [preview.index for preview in progress.previews] == [0, 1]
        pictures = [np.asarray(PIL.Image.open(io.BytesIO(preview.data))) for preview in progress.previews]
        assert all(max(picture.shape) == 64 and picture.std() > 1 for picture in pictures)


@engine
async def test_a_warm_up_changes_nothing_and_leaves_nothing_behind(model: Model) -> None:
    draft = model.guided(steps=2, output_format=model.lossless)
    gc.collect()
    # what fixtures of other tests still hold; kept here, so that no id is used again
    earlier = {id(thing): thing for thing in gc.get_objects() if type(thing) in (State, Rows)}
    async with live(model.checkpoint) as cold, live(model.checkpoint, warm_up_seconds=0.05) as warm:
        assert warm.engine.ready.cost != cold.engine.ready.cost == CostModel()
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) in (State, Rows) and id(thing) not in earlier]
        assert_equal_bit_for_bit(await warm.result(draft), await cold.result(draft))


@engine
async def test_a_whole_life_ends_with_its_files(model: Model) -> None:
    """Start to end through the engine: the same latents as the runner's, and one file for each output."""
    draft = model.guided(steps=2, seeds=(1, 2), output_format=model.lossless)
    (expected,) = model.run(draft)
    async with live(model.checkpoint) as it:
        job = it.submit(draft)
        await ended(job)
        latents, files = it.outcome(job)
        assert torch.equal(torch.stack(latents), expected.latents)
        request = model.request(draft)
        assert files == [encode(Output(pixels=image), request).data for image in expected.images]
        kinds = [
            type(entry.event)
            for entry in job.entries
            if isinstance(entry.event, StepProgress | ArtifactReady | Completed)
        ]
        assert kinds == [StepProgress, StepProgress, ArtifactReady, ArtifactReady, Completed]
        await it.empty()


# --- the spec ---------------------------------------------------------------------------------------------------------


def test_a_spec_survives_the_way_to_the_worker(model: Model) -> None:
    assert pickle.loads(pickle.dumps(model.spec)) == model.spec


def test_defaults_are_what_a_user_could_have_asked_for(model: Model) -> None:
    """A default is not checked when it is taken, so here each is given, as one would write it down."""
    defaults, first = model.checkpoint.defaults, model.entry.drafts[0]
    silent = Draft(
        model=model.checkpoint.name,
        prompt="a star",
        task=first.task,
        inputs=first.inputs,
        negative_prompt="",
        seeds=(1,),
    )
    # what is made of a picture has its shape
    of = model.request(silent) if first.inputs.given else defaults
    spelled = dataclasses.replace(
        silent,
        width=of.width,
        height=of.height,
        num_frames=defaults.num_frames,
        steps=defaults.steps,
        guidance=GuidanceDraft(**dataclasses.asdict(defaults.guidance)),
    )
    assert model.request(silent) == model.request(spelled)
    assert (model.request(silent).guidance.scale is not None) == (GuidanceKind.EMBEDDED in model.checkpoint.guidance)
    assert (model.request(silent).negative_prompt is not None) == (defaults.guidance.true_cfg_scale > 1)


def test_limits_leave_something_to_ask_for(model: Model) -> None:
    limits = model.checkpoint.limits
    assert limits.min_size % limits.size_multiple == limits.max_size % limits.size_multiple == 0
    assert limits.min_size <= limits.max_size
    assert limits.min_size**2 <= limits.max_pixels <= limits.max_size**2
    draft = model.draft(width=limits.min_size, height=limits.min_size)
    (smallest,) = model.run(draft)
    assert smallest.images[0].shape == shape(draft)


@pytest.mark.parametrize(("wider", "higher"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_one_multiple_more_or_less_works(model: Model, wider: int, higher: int) -> None:
    draft = model.draft(wider=wider, higher=higher, steps=1)
    assert model.run(draft)[0].images[0].shape == shape(draft)


@pytest.mark.parametrize("axis", ["width", "height"])
def test_a_size_between_multiples_is_refused_and_could_not_be_made(model: Model, axis: str) -> None:
    draft, multiple = model.draft(steps=1), model.checkpoint.limits.size_multiple
    size: int = getattr(draft, axis)
    for off in (size - 1, size + 1):
        with pytest.raises(
            InvalidArgument, match=f"{off} is not a multiple of {multiple}; nearest valid value: {size}"
        ):
            model.request(dataclasses.replace(draft, **{axis: off}))
    for part in range(1, multiple):
        if multiple % part == 0:
            assert not can_make(model, dataclasses.replace(model.request(draft), **{axis: size + part})), (
                f"{size + part} works, so the multiple is not {multiple}"
            )


def test_a_number_of_frames_between_multiples_is_refused_and_could_not_be_made(model: Model) -> None:
    draft, limits = model.draft(steps=1), model.checkpoint.limits
    if draft.num_frames is None:
        assert not limits.max_frames
        return
    for off in (draft.num_frames - 1, draft.num_frames + 1):
        with pytest.raises(InvalidArgument, match=f"{off} is not a multiple of .* valid value: {draft.num_frames}"):
            model.request(dataclasses.replace(draft, num_frames=off))
        assert not can_make(model, dataclasses.replace(model.request(draft), num_frames=off))


def can_make(model: Model, request: Request) -> bool:
    """Whether the pipeline, asked past the rules, makes an image of that size."""
    try:
        (result,) = model.run_requests(request)
    except (RuntimeError, ValueError):
        return False
    return result.images[0].shape == shape(request)


ALWAYS_GUIDED = {"helios", "wan", "z_image"}
"""Families that diffusers guides against the empty prompt where none is given."""


def test_without_a_negative_prompt_a_model_is_guided_where_diffusers_does_it(model: Model) -> None:
    asked = model.draft(negative_prompt=None, guidance=GuidanceDraft(true_cfg_scale=3.0))
    assert model.request(asked).negative_prompt == ("" if model.spec.family in ALWAYS_GUIDED else None)
