"""The unit of rate limits, against sums by hand."""

import dataclasses

import pytest

from omni_grpc.config import LimitsConfig
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.resolve.work import pixel_steps, pixels, predictions
from omni_grpc.types.request import Draft, Guidance, Request, Task
from omni_grpc.types.spec import GuidanceKind
from tests.toy import toy_checkpoint


def request(**changes) -> Request:
    draft = Draft(model="toy", prompt="x", width=64, height=32, steps=10)
    made = resolve_request(draft, ServingFacts(toy_checkpoint(), LimitsConfig()), id="job_1").request
    return dataclasses.replace(made, **changes)


GUIDED = {"negative_prompt": "", "guidance": Guidance(true_cfg_scale=4.0)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 64 * 32 * 10),
        ({"width": 128}, 128 * 32 * 10),
        ({"steps": 7}, 64 * 32 * 7),
        ({"num_outputs": 3}, 64 * 32 * 10 * 3),
        ({"num_frames": 81, "task": Task.TEXT_TO_VIDEO}, 64 * 32 * 10 * 81),
        ({"layers": 4, "task": Task.LAYERED}, 64 * 32 * 10 * 4),
        (GUIDED, 64 * 32 * 20),
        # of ten steps, those at 0.2, 0.3 and 0.4 are guided
        (GUIDED | {"guidance": Guidance(true_cfg_scale=4.0, interval_start=0.2, interval_end=0.5)}, 64 * 32 * 13),
        # what is guided away from may come as embeddings
        ({"extra": {"negative_prompt_embeds": [[0.0]]}}, 64 * 32 * 20),
        ({"num_outputs": 2, "num_frames": 5, **GUIDED}, 64 * 32 * 5 * 2 * 20),
    ],
)
def test_every_factor_counts(changes, expected):
    assert pixel_steps(request(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({"duration": 2.0, "sample_rate_hz": 16_000}, 32_000),
        ({"duration": 2.0}, 88_200),
        ({}, 441_000),
        ({"duration": 0.0}, 1),
    ],
)
def test_a_sound_has_samples_for_pixels_and_is_never_free(changes, samples):
    sound = request(task=Task.TEXT_TO_AUDIO, width=0, height=0, num_outputs=2, **changes)
    assert pixels(sound) == 2 * samples
    assert pixel_steps(sound) == 2 * samples * 10


def test_a_request_that_is_resolved_with_guidance_counts_two_predictions_a_step():
    facts = ServingFacts(toy_checkpoint(), LimitsConfig())
    assert GuidanceKind.TRUE_CFG in facts.checkpoint.guidance
    draft = Draft(model="toy", prompt="x", steps=4, negative_prompt="y")
    assert predictions(resolve_request(draft, facts, id="a").request) == 8
    assert predictions(resolve_request(dataclasses.replace(draft, negative_prompt=None), facts, id="a").request) == 4
