import dataclasses
import math

import pytest

from omni_grpc.config import LimitsConfig, ModelConfig
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.resolve.settings import Machine, place
from omni_grpc.types.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound
from omni_grpc.types.media import ImageFormat, ImageInput, Inputs, Preview
from omni_grpc.types.request import MAX_SEED, Draft, Guidance, GuidanceDraft, GuidanceNorm, Task
from omni_grpc.types.spec import Defaults, GuidanceKind
from tests.toy import toy_checkpoint

PARTS = ("true_cfg_scale", "scale_low_noise", "boundary_ratio")
FACTS = ServingFacts(toy_checkpoint(), LimitsConfig(max_steps=200, max_outputs=4, max_prompt_chars=1000))


def draft(**changes):
    return Draft(**({"model": "toy", "prompt": "a red circle"} | changes))


def resolve(facts=FACTS, **changes):
    return resolve_request(draft(**changes), facts, id="job_1")


def refusal(**changes):
    with pytest.raises(InvalidArgument) as caught:
        resolve(**changes)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_an_empty_draft_gets_the_models_defaults_and_is_told():
    resolved = resolve()
    request = resolved.request
    assert (request.width, request.height, request.steps) == (256, 128, 20)
    assert (request.num_outputs, request.output_format) == (1, ImageFormat.PNG)
    assert resolved.defaults_used == {
        "width": "256",
        "height": "128",
        "sampling.steps": "20",
        "sampling.num_outputs": "1",
        "output_format": "PNG",
        "sampling.seeds": "random",
    }
    assert resolved.warnings == ()


def test_what_is_given_is_kept_and_not_called_a_default():
    resolved = resolve(
        width=64, height=96, steps=3, seeds=(0,), num_outputs=2, output_format=ImageFormat.WEBP, negative_prompt=""
    )
    request = resolved.request
    assert (request.width, request.height, request.steps) == (64, 96, 3)
    assert request.seeds == (0, 1)
    assert request.output_format is ImageFormat.WEBP
    assert set(resolved.defaults_used) == {"sampling.guidance.true_cfg_scale", "sampling.guidance.norm"}


@pytest.mark.parametrize(
    ("axis", "value", "nearest"),
    [("width", 0, 16), ("height", 1080, 1024), ("width", 100, 96), ("height", 105, 112), ("width", 100_000, 1024)],
)
def test_sizes_are_refused_with_the_nearest_legal_one(axis, value, nearest):
    message = refusal(**{axis: value})[axis]
    assert str(value) in message
    assert message.endswith(f"nearest valid value: {nearest}")


def test_both_sizes_are_named_in_one_refusal():
    assert {"width", "height"} <= refusal(width=200, height=500).keys()


def test_the_pixel_budget_counts_the_area_and_names_a_size_that_fits():
    message = refusal(width=1024, height=512)["width, height"]
    assert "262144 pixels" in message
    assert message.endswith("720 x 352")
    tight = dataclasses.replace(FACTS, limits=LimitsConfig(max_pixels=64 * 64))
    with pytest.raises(InvalidArgument, match="4096 pixels"):
        resolve(tight, width=128, height=64)
    assert resolve(tight, width=64, height=64).request.width == 64


@pytest.mark.parametrize("steps", [0, -1, 201, 10**9, 2**31])
def test_steps_outside_the_range_are_refused(steps):
    assert "outside 1..200" in refusal(steps=steps)["sampling.steps"]


@pytest.mark.parametrize("outputs", [0, 5, 100])
def test_outputs_outside_the_range_are_refused(outputs):
    assert "outside 1..4" in refusal(num_outputs=outputs)["sampling.num_outputs"]


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -0.5, 1000.0])
@pytest.mark.parametrize("name", ["scale", "true_cfg_scale"])
def test_scales_must_be_finite_and_in_range(name, scale):
    assert "outside 0..100" in refusal(guidance=GuidanceDraft(**{name: scale}))[f"sampling.guidance.{name}"]


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 2**63, 2**64])
def test_seeds_outside_the_range_are_refused(seed):
    assert "outside 0.." in refusal(seeds=(seed,))["sampling.seeds"]


def test_the_last_seed_of_a_batch_must_be_in_range_too():
    assert resolve(seeds=(MAX_SEED - 1,), num_outputs=2).request.seeds == (MAX_SEED - 1, MAX_SEED)
    assert str(MAX_SEED - 1) in refusal(seeds=(MAX_SEED,), num_outputs=2)["sampling.seeds"]


def test_a_list_of_seeds_sets_the_outputs_or_must_match_them():
    assert resolve(seeds=(5, 3, 5)).request.num_outputs == 3
    assert resolve(seeds=(5, 3)).request.seeds == (5, 3)
    assert "2 seeds for 3 outputs" in refusal(seeds=(5, 3), num_outputs=3)["sampling.seeds"]


def test_a_drawn_seed_is_in_range_and_differs_from_the_next():
    drawn = [resolve(num_outputs=4).request.seeds for _ in range(4)]
    assert len({seeds[0] for seeds in drawn}) == 4
    assert all(seeds[0] >= 0 and seeds[3] == seeds[0] + 3 <= MAX_SEED for seeds in drawn)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_a_blank_prompt_is_refused(prompt):
    assert "is empty" in refusal(prompt=prompt)["prompt"]


def test_prompts_with_nul_or_too_long_are_refused_and_any_other_text_is_not():
    assert "position 3" in refusal(prompt="red\0dog")["prompt"]
    assert "1001 characters; the maximum is 1000" in refusal(negative_prompt="x" * 1001)["negative_prompt"]
    for prompt in ("\U0001f600 cat", "\u05d0\u05d1\u05d2", "a" * 1000):
        assert resolve(prompt=prompt).request.prompt == prompt


def test_an_unknown_model_is_not_found_and_the_served_one_is_named():
    with pytest.raises(NotFound, match="this server has toy") as caught:
        resolve(model="other")
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_a_task_the_model_lacks_names_those_it_has():
    with pytest.raises(FailedPrecondition) as caught:
        resolve(task=Task.TEXT_TO_VIDEO)
    assert caught.value.reason == "TASK_NOT_SUPPORTED"
    assert caught.value.failure.metadata["tasks"] == "TEXT_TO_IMAGE"


def codes(resolved):
    return [(warning.code, warning.field) for warning in resolved.warnings]


def test_guidance_is_on_with_a_negative_prompt_and_off_without():
    on = resolve(negative_prompt="", guidance=GuidanceDraft(true_cfg_scale=3.0))
    assert on.request.negative_prompt == ""
    assert (on.request.guidance.true_cfg_scale, on.request.guidance.norm) == (3.0, GuidanceNorm.RENORM)
    assert codes(on) == []
    off = resolve(guidance=GuidanceDraft(true_cfg_scale=3.0))
    assert (off.request.guidance.true_cfg_scale, off.request.guidance.norm) == (1.0, GuidanceNorm.NONE)
    assert codes(off) == [("CFG_OFF", "negative_prompt")]


EXPERTS = Guidance(true_cfg_scale=4.0, scale_low_noise=3.0, boundary_ratio=0.875)


@pytest.mark.parametrize(
    ("asked", "scales", "given"),
    [
        (GuidanceDraft(), (4.0, 3.0, 0.875), set()),
        (GuidanceDraft(true_cfg_scale=6.0), (6.0, 6.0, 0.875), {"true_cfg_scale", "scale_low_noise"}),
        (GuidanceDraft(scale_low_noise=2.0), (4.0, 2.0, 0.875), {"scale_low_noise"}),
        (GuidanceDraft(true_cfg_scale=6.0, scale_low_noise=0.0, boundary_ratio=0.0), (6.0, 0.0, 0.0), set(PARTS)),
    ],
)
def test_a_second_expert_has_the_scale_of_the_first_unless_neither_is_given(asked, scales, given):
    checkpoint = toy_checkpoint(defaults=lambda configs: Defaults(width=64, height=64, steps=2, guidance=EXPERTS))
    resolved = resolve(ServingFacts(checkpoint, LimitsConfig()), negative_prompt="", guidance=asked)
    assert tuple(getattr(resolved.request.guidance, part) for part in PARTS) == scales
    assert codes(resolved) == []
    used = {part for part in PARTS if f"sampling.guidance.{part}" in resolved.defaults_used}
    assert used == set(PARTS) - given


def test_what_belongs_to_a_second_expert_is_a_warning_without_one_or_without_guidance():
    asked = GuidanceDraft(scale_low_noise=2.0, boundary_ratio=0.5)
    one = resolve(negative_prompt="", guidance=asked)
    assert (one.request.guidance.scale_low_noise, one.request.guidance.boundary_ratio) == (None, None)
    assert [(warning.field, warning.message) for warning in one.warnings] == [
        ("sampling.guidance.scale_low_noise", "ToyPipeline has no second expert"),
        ("sampling.guidance.boundary_ratio", "ToyPipeline has no second expert"),
    ]
    checkpoint = toy_checkpoint(defaults=lambda configs: Defaults(width=64, height=64, steps=2, guidance=EXPERTS))
    off = resolve(ServingFacts(checkpoint, LimitsConfig()), guidance=asked)
    assert (off.request.guidance.scale_low_noise, off.request.guidance.boundary_ratio) == (None, 0.5)
    assert [(warning.field, warning.message) for warning in off.warnings] == [
        ("sampling.guidance.scale_low_noise", "classifier-free guidance is off")
    ]


def test_a_negative_prompt_without_guidance_is_a_warning():
    resolved = resolve(negative_prompt="blurry", guidance=GuidanceDraft(true_cfg_scale=1.0))
    assert resolved.request.negative_prompt is None
    assert codes(resolved) == [("NEGATIVE_PROMPT_WITHOUT_EFFECT", "negative_prompt")]


def test_a_scale_that_the_model_has_not_is_a_warning_and_is_not_echoed():
    resolved = resolve(guidance=GuidanceDraft(scale=7.0, norm=GuidanceNorm.RENORM))
    assert resolved.request.guidance.scale is None
    assert codes(resolved) == [
        ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.scale"),
        ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.norm"),
    ]


@pytest.mark.parametrize(
    ("guidance", "field"),
    [
        ({"rescale": 1.5}, "rescale"),
        ({"rescale": math.nan}, "rescale"),
        ({"interval_start": -0.1}, "interval_start"),
        ({"interval_end": 1.1}, "interval_end"),
        ({"interval_start": 0.5, "interval_end": 0.5}, "interval_start, sampling.guidance.interval_end"),
        ({"interval_end": 0.0}, "interval_start, sampling.guidance.interval_end"),
    ],
)
def test_shares_and_intervals_must_be_in_range(guidance, field):
    assert f"sampling.guidance.{field}" in refusal(guidance=GuidanceDraft(**guidance))


def test_rescaling_what_is_normed_anyway_is_a_warning():
    asked = {"negative_prompt": "", "guidance": GuidanceDraft(rescale=0.5)}
    assert codes(resolve(**asked)) == [("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.rescale")]
    asked["guidance"] = GuidanceDraft(rescale=0.5, norm=GuidanceNorm.NONE)
    resolved = resolve(**asked)
    assert codes(resolved) == []
    assert resolved.request.guidance.rescale == 0.5


@pytest.mark.parametrize(
    ("preview", "field"), [(Preview(every_steps=0), "every_steps"), (Preview(max_edge_px=8), "max_edge_px")]
)
def test_previews_must_be_in_range(preview, field):
    assert f"options.preview.{field}" in refusal(preview=preview)


def test_a_distilled_model_takes_the_scale_and_warns_of_the_other():
    facts = ServingFacts(toy_checkpoint(guidance=(GuidanceKind.EMBEDDED,)), LimitsConfig())
    resolved = resolve(facts, guidance=GuidanceDraft(scale=3.5, true_cfg_scale=2.0), negative_prompt="x")
    assert resolved.request.guidance.scale == 3.5
    assert resolved.request.guidance.true_cfg_scale == 1.0
    assert ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.true_cfg_scale") in codes(resolved)


def test_a_checkpoint_may_have_fewer_kinds_of_guidance_than_its_class():
    kinds = {"ToyScheduler": (GuidanceKind.EMBEDDED,), "Other": ()}
    checkpoint = toy_checkpoint(guidance=lambda configs: kinds[configs["scheduler"]["_class_name"]])
    asked = GuidanceDraft(scale=3.5)
    assert resolve(ServingFacts(checkpoint, LimitsConfig()), guidance=asked).request.guidance.scale == 3.5
    other = dataclasses.replace(checkpoint, configs={"scheduler": {"_class_name": "Other"}})
    resolved = resolve(ServingFacts(other, LimitsConfig()), guidance=asked)
    assert resolved.request.guidance.scale is None
    assert codes(resolved) == [("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.scale")]


def test_a_scheduler_is_the_checkpoints_own_or_one_that_the_model_offers():
    offering = ServingFacts(toy_checkpoint(schedulers=("Heun", "ToyScheduler")), LimitsConfig())
    assert offering.checkpoint.schedulers == ("ToyScheduler", "Heun")
    for facts, names in ((FACTS, ("", "ToyScheduler")), (offering, ("", "ToyScheduler", "Heun"))):
        assert [resolve(facts, scheduler=name).request.scheduler for name in names] == list(names)
    assert refusal(scheduler="Heun") == {"sampling.scheduler": "ToyPipeline has no 'Heun'; it has ToyScheduler"}
    with pytest.raises(InvalidArgument, match="ToyPipeline has no 'heun'; it has ToyScheduler, Heun"):
        resolve(offering, scheduler="heun")
    bare = dataclasses.replace(FACTS, checkpoint=dataclasses.replace(FACTS.checkpoint, configs={}))
    with pytest.raises(InvalidArgument, match="it has none to choose from; leave it unset"):
        resolve(bare, scheduler="Heun")


@pytest.mark.parametrize(
    ("picture", "area", "size"),
    [
        ((400, 304), None, (400, 304)),
        ((410, 310), None, (400, 304)),
        ((1000, 1000), None, (512, 512)),
        ((192, 192), 256 * 256, (256, 256)),
        ((65, 65), 512 * 512, (512, 512)),
        ((400, 100), 128 * 128, (256, 64)),
        ((5000, 5), 512 * 512, (1024, 16)),
        ((10, 10), 2048 * 2048, (512, 512)),
    ],
)
def test_an_edit_is_as_large_as_its_picture_or_has_the_area_of_the_model(picture, area, size):
    """And no more pixels than are allowed, 512 x 512 here."""
    toy = toy_checkpoint(tasks=(Task.IMAGE_EDIT,), takes=frozenset({"images"}))
    limits = dataclasses.replace(toy.limits, max_input_images=1)
    defaults = dataclasses.replace(toy.defaults, image_area=area)
    spec = dataclasses.replace(toy.spec, limits=lambda configs: limits, defaults=lambda configs: defaults)
    facts = ServingFacts(dataclasses.replace(toy, spec=spec), LimitsConfig())
    width, height = picture
    inputs = Inputs(images=(ImageInput(width, height, 1, bytes(width * height)),))
    resolved = resolve(facts, task=Task.IMAGE_EDIT, inputs=inputs)
    assert (resolved.request.width, resolved.request.height) == size
    assert resolved.defaults_used["width"] == str(size[0])
    assert resolve(facts, task=Task.IMAGE_EDIT, inputs=inputs, width=48).request.width == 48


def test_auto_follows_the_machine():
    cpu, gpu = Machine(cuda=False, cores=4), Machine(cuda=True, cores=4)
    auto = ModelConfig(model="m")
    assert dataclasses.astuple(place(auto, cpu)) == ("cpu", "float32", 3)
    assert dataclasses.astuple(place(auto, gpu)) == ("cuda:0", "bfloat16", None)
    assert place(auto, Machine(cuda=False, cores=1)).cpu_threads == 1
    forced = ModelConfig(model="m", device="cpu", dtype="bfloat16", cpu_threads=2)
    assert dataclasses.astuple(place(forced, gpu)) == ("cpu", "bfloat16", 2)
    with pytest.raises(ConfigError, match="--device cpu"):
        place(ModelConfig(model="m", device="cuda"), cpu)


def test_a_model_that_is_always_guided_is_guided_against_the_empty_prompt() -> None:
    always = toy_checkpoint(
        defaults=lambda configs: Defaults(
            width=64, height=64, steps=2, guidance=Guidance(true_cfg_scale=4.0), negative_prompt=""
        )
    )
    facts = ServingFacts(always, LimitsConfig())
    resolved = resolve(facts)
    assert (resolved.request.negative_prompt, resolved.request.guidance.true_cfg_scale) == ("", 4.0)
    assert resolved.defaults_used["negative_prompt"] == ""
    asked = resolve(facts, guidance=GuidanceDraft(true_cfg_scale=2.0, rescale=0.5))
    assert (asked.request.negative_prompt, asked.request.guidance.true_cfg_scale) == ("", 2.0)
    assert asked.warnings == ()
    off = resolve(facts, guidance=GuidanceDraft(true_cfg_scale=1.0))
    assert (off.request.negative_prompt, "negative_prompt" in off.defaults_used) == (None, False)
    told = resolve(facts, negative_prompt="blurry")
    assert (told.request.negative_prompt, "negative_prompt" in told.defaults_used) == ("blurry", False)
