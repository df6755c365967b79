"""The same request gives the same picture, whoever shares its steps; and guidance does what it says."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from omni_grpc.config import LimitsConfig
from omni_grpc.loading.loader import Loader
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft, GuidanceDraft, GuidanceNorm
from omni_grpc.worker.packed import PackedRunner
from tests.server.service import image

SHORT = {"prompt": "minecraft", "width": 64, "height": 48, "steps": 3, "seeds": (7,)}
LONG = {"prompt": "a red circle left of a blue square " * 40, "width": 32, "height": 32, "steps": 3, "seeds": (8,)}


def requests(checkpoint, *drafts):
    facts = ServingFacts(checkpoint, LimitsConfig())
    return [
        resolve_request(Draft(**({"model": "tiny"} | draft)), facts, id=f"job_{i}").request
        for i, draft in enumerate(drafts)
    ]


def run(runner, *together):
    """The final latents of each output of each request, after steps that they all share."""
    for request in together:
        runner.prepare(request)
    ids = tuple(request.id for request in together)
    for _ in range(together[0].steps):
        assert runner.step(ids).broken == ()
    outputs = [[state.latents for state in runner._held[job_id].states] for job_id in ids]
    runner.drop(ids)
    return outputs


def generate(omni, **changes):
    values = {"prompt": "a red circle", "width": 48, "height": 32, "steps": 3, "seed": 7}
    return omni.generate(**(values | {"output_format": ImageFormat.RAW_RGB8} | changes))


def pixels(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).astype(int)


def apart(one: bytes, other: bytes) -> int:
    """The largest difference of two pictures, in levels of 256."""
    return int(np.abs(pixels(one) - pixels(other)).max())


# --- determinism ------------------------------------------------------------------------------------------------------


# report B018
def test_a_longer_prompt_beside_it_does_not_change_a_picture(runner, checkpoint):
    short, long = requests(checkpoint, SHORT, LONG)
    ((alone,),) = run(runner, short)
    (together,), _ = run(runner, short, long)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


# report B019
def test_each_picture_of_several_can_be_made_alone(omni):
    several = generate(omni, seed=40, num_outputs=4)
    assert several.seeds == (40, 41, 42, 43)
    for data, seed in zip(several.files, several.seeds, strict=True):
        assert apart(generate(omni, seed=seed).files[0], data) <= 1


# report B020
@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("negative", [None, "blurry"], ids=["plain", "guided"])
def test_several_pictures_at_once_are_several_pictures(omni, outputs, negative):
    several = generate(omni, num_outputs=outputs, negative_prompt=negative)
    assert len(several.images) == outputs
    assert apart(generate(omni, negative_prompt=negative).files[0], several.files[0]) <= 1


# report B021
@pytest.mark.parametrize("seeds", [(7, 8, 9), (5, 3, 11)], ids=["counted", "listed"])
def test_the_pictures_of_a_batch_differ_and_their_seeds_are_true(omni, seeds):
    asked = {"seed": 7} if seeds == (7, 8, 9) else {"seed": None, "seeds": seeds}
    batch = generate(omni, num_outputs=3, **asked)
    assert batch.seeds == batch.effective.seeds == seeds
    assert all(apart(one, other) > 1 for one, other in itertools.combinations(batch.files, 2))


# report B023
def test_the_same_call_gives_the_same_bits_whatever_came_between(omni):
    first = generate(omni).files
    assert generate(omni).files == first
    generate(omni, prompt="something else", seed=1, width=64)
    assert generate(omni).files == first


# report B024
def test_noise_is_drawn_on_the_cpu_and_depends_on_the_seed_alone(runner, checkpoint, pipeline):
    one, other = requests(checkpoint, SHORT, SHORT | {"prompt": "another", "steps": 5, "seeds": (7, 7)})
    runner.prepare(one)
    runner.prepare(other)
    states = [state for job_id in (one.id, other.id) for state in runner._held[job_id].states]
    height, width = SHORT["height"] // 8, SHORT["width"] // 8
    noise = torch.randn((pipeline.vae.channels, 1, height, width), generator=torch.Generator("cpu").manual_seed(7))
    for state in states:
        assert torch.equal(state.grid.unpack(state.latents), noise)


# report B026
def test_equal_rows_of_a_batch_are_equal_and_a_batch_of_two_is_close_to_one_in_bfloat16(checkpoint):
    from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline

    half = QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16))
    runner = PackedRunner(half, torch.device("cpu"), "omni-test-half-")
    one, other = requests(checkpoint, SHORT, SHORT)
    (first,), (second,) = run(runner, one, other)
    assert torch.equal(first, second)
    ((alone,),) = run(runner, one)
    assert torch.equal(run(runner, one)[0][0], alone), "one at a time, the same bits"
    assert (first.float() - alone.float()).square().mean().sqrt() < 0.03


# report B027
def test_a_native_model_makes_what_diffusers_makes(omni, tiny_qwen_image):
    from diffusers import QwenImagePipeline

    theirs = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    theirs.set_progress_bar_config(disable=True)
    asked = {"prompt": "a red circle", "negative_prompt": "blurry", "width": 48, "height": 32, "true_cfg_scale": 4.0}
    generator = torch.Generator().manual_seed(7)
    with torch.inference_mode():
        (picture,) = theirs(**asked, num_inference_steps=3, generator=generator, output_type="np").images
    mine = generate(omni, **asked, guidance_norm=GuidanceNorm.RENORM)
    assert np.abs(pixels(mine.files[0]) - (picture * 255).round().astype(int).ravel()).max() <= 1


# --- guidance ---------------------------------------------------------------------------------------------------------


# report B028
def test_the_scale_that_a_model_lacks_is_a_warning_and_the_one_it_has_works(omni):
    for scale in (1.0, 8.0):
        result = generate(omni, guidance_scale=scale)
        assert [(warning.code, warning.field) for warning in result.warnings] == [
            ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.scale")
        ]
        assert "true_cfg_scale" in result.warnings[0].message
        assert result.effective.guidance.scale is None
    weak, strong = (generate(omni, negative_prompt=" ", true_cfg_scale=scale) for scale in (1.0, 8.0))
    assert apart(weak.files[0], strong.files[0]) > 1


# report B029
def test_guidance_that_is_off_says_so_and_an_empty_negative_prompt_is_one(omni):
    plain = generate(omni)
    unused = generate(omni, negative_prompt="blurry", true_cfg_scale=1.0)
    unset = generate(omni, true_cfg_scale=4.0)
    empty = generate(omni, negative_prompt="", true_cfg_scale=4.0)
    assert [warning.code for warning in unused.warnings] == ["NEGATIVE_PROMPT_WITHOUT_EFFECT"]
    assert [(warning.code, warning.applied) for warning in unset.warnings] == [("CFG_OFF", "1")]
    assert plain.files == unused.files == unset.files
    assert (empty.warnings, empty.effective.guidance.true_cfg_scale) == ((), 4.0)
    assert apart(empty.files[0], plain.files[0]) > 1


# report B032
async def test_guidance_reaches_the_worker_and_comes_back_whole(service):
    asked = {
        "true_cfg_scale": 3.5, "norm": "GUIDANCE_NORM_RENORM_CLIPPED", "rescale": 0.25,
        "interval_start": 0.125, "interval_end": 0.75,
    }  # fmt: skip
    request = image(negative_prompt="blurry", sampling={"guidance": asked})
    events = [message.event async for message in service.generation.GenerateImage(request)]
    ((handed_over,),) = (plan.admit for plan in service.executor.plans if plan.admit)
    norm = GuidanceNorm.RENORM_CLIPPED
    expected = GuidanceDraft(**(asked | {"norm": norm}))
    for name in asked:
        assert getattr(handed_over.guidance, name) == getattr(expected, name)
    assert handed_over.negative_prompt == "blurry"
    effective = events[-1].completed.effective.guidance
    echoed = {field.name: value for field, value in effective.ListFields()}
    assert echoed == asked | {"norm": 3}


# report B114
def test_two_requests_at_once_do_not_share_a_schedule(omni):
    drafts = [
        Draft(
            model="tiny", prompt="x", width=32, height=32, steps=steps, seeds=(3,), output_format=ImageFormat.RAW_RGB8
        )
        for steps in (26, 50)
    ]
    alone = [omni.run(draft) for draft in drafts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(omni.run, drafts))
    for one, other in zip(alone, together, strict=True):
        assert apart(one.files[0], other.files[0]) <= 1
        assert other.stats.steps_run == other.effective.steps == one.effective.steps
