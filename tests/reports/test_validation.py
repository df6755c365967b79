"""Requests that must be refused, and those that must not."""

import dataclasses
import io
import itertools
import math
from pathlib import Path

import PIL.Image
import pytest

from omni_grpc import InvalidArgument
from omni_grpc.config import LimitsConfig
from omni_grpc.engine.scheduler import Lane
from omni_grpc.models.qwen_image import SPECS
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft, GuidanceDraft
from omni_grpc.types.spec import Checkpoint
from omni_grpc.v1 import job_pb2
from tests.server.service import CHECKPOINT, image, kinds, refusal, serving, to_error


async def both_refusals(service, **changes):
    """How the two calls that make images refuse a request, which must be alike, with nothing done for it."""
    request = image(**changes)
    streamed = await refusal(service.generation.GenerateImage(request))
    created = await refusal(service.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=request)))
    assert (streamed.code, streamed.reason, streamed.message) == (created.code, created.reason, created.message)
    assert service.executor.plans == []
    assert len(service.engine.jobs) == 0
    return streamed


async def still_works(service) -> None:
    assert kinds([message.event async for message in service.generation.GenerateImage(image())])[-1] == "completed"


def resolve(facts=None, **changes):
    facts = facts or ServingFacts(CHECKPOINT, LimitsConfig())
    draft = Draft(**({"model": facts.checkpoint.name, "prompt": "a red circle"} | changes))
    return resolve_request(draft, facts, id="job_1")


def small(omni, **changes):
    return omni.generate(**({"prompt": "a red circle", "width": 32, "height": 32, "steps": 1, "seed": 7} | changes))


# report B001
@pytest.mark.parametrize(
    ("width", "height", "bad"),
    [(1920, 1080, {"height": 1088}), (200, 500, {"width": 192, "height": 496})],
)
async def test_a_size_that_the_model_cannot_do_is_refused_at_once(service, width, height, bad):
    error = await both_refusals(service, width=width, height=height)
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", list(bad))
    for axis, nearest in bad.items():
        asked = {"width": width, "height": height}[axis]
        assert f"{axis}: {asked} is not a multiple of 16; nearest valid value: {nearest}" in error.message
    await still_works(service)


# report B002
@pytest.mark.parametrize(("stages", "multiple"), [([1, 2, 4], 8), ([1, 2, 4, 4], 16), ([1, 2, 4, 4, 4], 32)])
def test_the_multiple_is_that_of_the_checkpoint(stages, multiple):
    checkpoint = Checkpoint(name="qwen", path=Path("qwen"), spec=SPECS[0], configs={"vae": {"dim_mult": stages}})
    facts = ServingFacts(checkpoint, LimitsConfig())
    assert resolve(facts, width=22 * multiple).request.width == 22 * multiple
    with pytest.raises(InvalidArgument, match=f"is not a multiple of {multiple}; nearest valid value"):
        resolve(facts, width=22 * multiple + multiple // 2)


# report B003
@pytest.mark.parametrize(("width", "height"), [(64, 32), (32, 48)])
def test_the_picture_has_the_size_that_was_asked(omni, width, height):
    result = small(omni, width=width, height=height)
    assert [picture.size for picture in result.images] == [(width, height)]
    assert (result.effective.width, result.effective.height) == (width, height)


# report B004
async def test_absurd_sizes_are_refused_and_the_operators_budget_counts():
    async with serving(max_pixels=1_000_000) as service:
        error = await both_refusals(service, width=100_000, height=10_000)
        assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["width", "height", "width, height"])
        error = await both_refusals(service, width=2048, height=2048)
        assert error.fields == ["width, height"]
        assert "2048 x 2048 is more than 1000000 pixels; the same shape fits as 992 x 992" in error.message
        await still_works(service)


# report B005
@pytest.mark.parametrize("steps", [0, 201, 2**31])
async def test_steps_outside_of_the_range_are_refused(service, steps):
    error = await both_refusals(service, sampling={"steps": steps})
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["sampling.steps"])
    assert f"{steps} is outside 1..200" in error.message
    with pytest.raises(InvalidArgument, match=r"-1 is outside 1\.\.200"):
        resolve(steps=-1)
    await still_works(service)


# report B006
@pytest.mark.parametrize("seed", [2**53, 2**63, 2**64 - 1])
async def test_seeds_outside_of_the_range_are_refused(service, seed):
    error = await both_refusals(service, sampling={"seed": seed})
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["sampling.seeds"])
    assert f"{seed} is outside 0..{2**53 - 1}; nearest valid value: {2**53 - 1}" in error.message
    with pytest.raises(InvalidArgument, match="-1 is outside"):
        resolve(seeds=(-1,))
    assert resolve(seeds=(2**32,)).request.seeds == (2**32,)
    await still_works(service)


# report B006
async def test_a_seed_cannot_hide_in_extra_fields(service):
    request = image()
    request.sampling.extra["seed"] = float(2**64)
    error = await refusal(service.generation.GenerateImage(request))
    assert (error.reason, error.fields) == ("INVALID_ARGUMENT", ["sampling.extra"])
    await still_works(service)


# report B007
def test_seed_zero_is_a_seed_and_a_drawn_one_is_told(omni):
    first, again = small(omni, seed=0), small(omni, seed=0)
    assert (first.files, first.seeds) == (again.files, (0,))
    assert "sampling.seeds" not in first.effective.defaults_used
    drawn = small(omni, seed=None)
    assert drawn.effective.defaults_used["sampling.seeds"] == "random"
    assert small(omni, seed=drawn.seeds[0]).files == drawn.files != first.files


# report B008
@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
async def test_a_blank_prompt_is_refused_everywhere(service, prompt):
    error = await both_refusals(service, prompt=prompt)
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["prompt"])


# report B009
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": {"num_outputs": 0}}, "sampling.num_outputs"),
        ({"sampling": {"num_outputs": 11}}, "sampling.num_outputs"),
        ({"output_format": 99}, "output_format"),
        ({"sampling": {"loras": [{"lora_id": "foo"}]}}, "sampling.loras.lora_id"),
        ({"sampling": {"scheduler": "euler"}}, "sampling.scheduler"),
        ({"options": {"on_server_restart": 9}}, "options.on_server_restart"),
    ],
)
async def test_malformed_fields_are_refused_by_name(service, changes, field):
    error = await both_refusals(service, **changes)
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])


# report B010
@pytest.mark.parametrize("lane", list(Lane))
async def test_a_failed_request_is_not_reported_as_a_success(service, lane):
    service.executor.failures[lane] = Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message="shapes do not fit")
    messages, error = await to_error(service.generation.GenerateImage(image()))
    assert (error.code, error.reason, error.message) == ("INTERNAL", "WORKER_ERROR", "shapes do not fit")
    assert kinds([message.event for message in messages]).count("completed") == 0


# report B011
@pytest.mark.parametrize("format", list(ImageFormat))
def test_every_format_that_is_promised_is_made(omni, format):
    result = small(omni, width=48, output_format=format)
    (picture,) = result.images
    assert (picture.size, result.effective.output_format) == ((48, 32), format)
    if format is not ImageFormat.RAW_RGB8:
        assert PIL.Image.open(io.BytesIO(result.files[0])).format == format.value


# report B012
def test_the_end_of_a_long_prompt_counts_and_what_does_not_fit_is_told(omni):
    long = "a photo of a cat " * 30
    red, blue = (small(omni, prompt=f"{long} in a {colour} hat", steps=2) for colour in ("RED", "BLUE"))
    assert red.files != blue.files
    assert (red.warnings, red.effective.dropped_tokens) == ((), {})
    too_long = small(omni, prompt="word " * 10_000)
    (warning,) = too_long.warnings
    assert (warning.code, warning.field) == ("PROMPT_TRUNCATED", "prompt")
    assert warning.applied == str(too_long.effective.dropped_tokens["prompt"])
    assert too_long.effective.dropped_tokens["prompt"] > 5_000


SCALES = ("scale", "true_cfg_scale", "rescale", "interval_start", "interval_end")


# report B014
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e9])
async def test_numbers_that_no_sampler_can_use_are_refused(service, value):
    for name in SCALES:
        field = f"sampling.guidance.{name}"
        error = await both_refusals(service, sampling={"guidance": {name: value}})
        assert error.code == "INVALID_ARGUMENT"
        assert field in error.fields


TEXTS = [
    "dragon \U0001f409 \u9f8d caf\u00e9",
    "\U0001f469\u200d\U0001f467",
    "\u05e9\u05dc\u05d5\u05dd",
    "a\u0301\u202e",
]


# report B015
async def test_a_prompt_may_be_in_any_script(service, omni):
    for text in TEXTS:
        assert small(omni, prompt=text, negative_prompt=text).files
        await service.finished(prompt=text)
    asked = [request.prompt for plan in service.executor.plans for request in plan.admit]
    assert asked == TEXTS, "what the worker reads is what was sent"


# report B015
@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"], ids=["NUL", "lone surrogate"])
def test_a_prompt_with_nul_or_a_lone_surrogate_is_refused(omni, text):
    for field in ("prompt", "negative_prompt"):
        with pytest.raises(InvalidArgument) as caught:
            small(omni, **{field: text})
        assert [violation.field for violation in caught.value.violations] == [field]


# report B016
async def test_an_unknown_model_is_not_found_and_the_known_one_is_named(service):
    error = await both_refusals(service, model="not-the-loaded-checkpoint")
    assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert "this server has toy" in error.message


# report B017
def test_what_every_request_may_set_harms_no_model(omni):
    """Each of the common parameters is used, is a warning, or is refused by name: none is an error of the worker."""
    guidance = [GuidanceDraft(scale=4.0), GuidanceDraft(true_cfg_scale=4.0), GuidanceDraft(rescale=0.5)]
    for asked, negative in itertools.product(guidance, (None, "", "blurry")):
        draft = Draft(
            model="tiny", prompt="x", negative_prompt=negative, width=32, height=32, steps=1, seeds=(1,), guidance=asked
        )
        result = omni.run(draft)
        effective = dataclasses.asdict(result.effective.guidance)
        given = {name: value for name, value in dataclasses.asdict(asked).items() if value is not None}
        assert all(effective[name] == value for name, value in given.items()) or result.warnings
