"""The runner with a real model: what one request gets does not depend on who shares its steps."""

import hashlib
import io

import numpy as np
import PIL.Image
import pytest
import torch

from omni_grpc import shared
from omni_grpc.config import LimitsConfig
from omni_grpc.errors import Code, InternalError
from omni_grpc.plan import Broken
from omni_grpc.registry import open_checkpoint
from omni_grpc.request import Draft, GuidanceDraft, ImageFormat
from omni_grpc.resolve import Facts, resolve_request
from omni_grpc.worker.runner import Runner

UNLIKE = [
    {"prompt": "a red circle", "width": 64, "height": 64, "steps": 2, "seeds": (1,)},
    {"prompt": "two blue squares left of a star", "width": 96, "height": 64, "steps": 4, "seeds": (2, 9)},
    {
        "prompt": "a ring",
        "negative_prompt": "blurry, low quality",
        "guidance": GuidanceDraft(true_cfg_scale=4.0),
        "width": 32,
        "height": 48,
        "steps": 3,
        "seeds": (3,),
    },
]


@pytest.fixture(scope="module")
def checkpoint(tiny_qwen_image):
    return open_checkpoint(tiny_qwen_image, name="tiny")


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline

    return QwenImagePipeline.load(checkpoint, torch.device("cpu"), torch.float32)


@pytest.fixture
def runner(pipeline, request):
    return Runner(pipeline, torch.device("cpu"), f"omni-test-{abs(hash(request.node.name)):x}-")


def requests(checkpoint, drafts=UNLIKE):
    facts = Facts(checkpoint, LimitsConfig())
    return [
        resolve_request(Draft(model="tiny", **draft), facts, id=f"job_{i}").request for i, draft in enumerate(drafts)
    ]


def latents(runner, job_id):
    return [state.latents for state in runner._states[job_id]]


def run_alone(runner, request):
    runner.prepare(request)
    for _ in range(request.steps):
        runner.step((request.id,))
    return latents(runner, request.id)


def test_unlike_requests_that_join_late_and_leave_early_get_what_they_get_alone(runner, checkpoint):
    asked = requests(checkpoint)
    alone = {request.id: run_alone(runner, request) for request in asked}
    running, waiting, seen = [], list(asked), {}
    while waiting or running:
        if waiting:
            request = waiting.pop(0)
            runner.prepare(request)
            running.append(request.id)
        report = runner.step(tuple(running))
        assert report.broken == ()
        for progress in report.progress:
            seen.setdefault(progress.id, []).append(progress)
        running = [progress.id for progress in report.progress if not progress.finished]
    for request in asked:
        steps = seen[request.id]
        assert [progress.step for progress in steps] == list(range(1, request.steps + 1))
        assert [progress.total for progress in steps] == [request.steps] * request.steps
        assert [progress.finished for progress in steps] == [False] * (request.steps - 1) + [True]
        branches = 1 if request.negative_prompt is None else 2
        assert {progress.rows for progress in steps} == {branches * request.num_outputs}
        assert {progress.evals for progress in steps} == {branches}
        assert steps[0].sigma == 1.0
        for together, solo in zip(latents(runner, request.id), alone[request.id], strict=True):
            torch.testing.assert_close(together, solo, rtol=0, atol=1e-5)


def test_the_same_request_twice_is_equal_bit_for_bit(runner, checkpoint):
    request = requests(checkpoint)[2]
    first = run_alone(runner, request)
    runner.drop((request.id,))
    assert torch.equal(first[0], run_alone(runner, request)[0])


def test_outputs_have_noise_of_their_own_and_each_can_be_made_alone(runner, checkpoint):
    batch, single = requests(
        checkpoint,
        [
            {"prompt": "a star", "width": 32, "height": 32, "steps": 2, "seeds": (40,), "num_outputs": 3},
            {"prompt": "a star", "width": 32, "height": 32, "steps": 2, "seeds": (42,)},
        ],
    )
    outputs = run_alone(runner, batch)
    assert not torch.allclose(outputs[0], outputs[1])
    torch.testing.assert_close(run_alone(runner, single)[0], outputs[2], rtol=0, atol=1e-5)


def test_a_dropped_request_takes_no_more_steps_and_its_neighbour_goes_on(runner, checkpoint):
    first, second, _ = requests(checkpoint)
    runner.prepare(first)
    runner.prepare(second)
    runner.step((first.id, second.id))
    runner.drop((first.id,))
    report = runner.step((first.id, second.id))
    assert [progress.id for progress in report.progress] == [second.id]
    assert runner.step((first.id,)).progress == ()


def test_a_failing_forward_fails_its_requests_and_leaves_no_state(runner, checkpoint, pipeline, monkeypatch):
    first, second, _ = requests(checkpoint)
    runner.prepare(first)
    runner.prepare(second)

    def explode(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pipeline, "predict", explode)
    report = runner.step((first.id, second.id))
    assert report.progress == ()
    assert [type(broken) for broken in report.broken] == [Broken, Broken]
    assert report.broken[0].failure.code is Code.RESOURCE_EXHAUSTED
    assert report.broken[0].failure.reason == "OUT_OF_MEMORY"
    assert runner._states == {}
    monkeypatch.undo()
    assert len(run_alone(runner, first)) == 1


def test_latents_that_are_not_finite_are_an_error_not_a_black_image(runner, checkpoint):
    request = requests(checkpoint)[0]
    run_alone(runner, request)
    (state,) = runner._states[request.id]
    state.latents = state.latents.clone().index_fill_(0, torch.tensor(0), torch.nan)
    with pytest.raises(InternalError) as caught:
        runner.decode(request.id)
    assert caught.value.reason == "NON_FINITE_LATENTS"


@pytest.mark.parametrize("format", list(ImageFormat))
def test_decoded_outputs_are_files_of_the_asked_size_and_format(runner, checkpoint, format):
    (request,) = requests(
        checkpoint,
        [
            {
                "prompt": "x",
                "width": 48,
                "height": 32,
                "steps": 1,
                "seeds": (5,),
                "num_outputs": 2,
                "output_format": format,
            }
        ],
    )
    run_alone(runner, request)
    report = runner.decode(request.id)
    assert [(media.index, media.seed, media.width, media.height) for media in report.media] == [
        (0, 5, 48, 32),
        (1, 6, 48, 32),
    ]
    for media in report.media:
        data = shared.take(media.data)
        assert hashlib.sha256(data).hexdigest() == media.sha256
        assert media.mime_type == format.mime_type
        if format is ImageFormat.RAW_RGB8:
            assert len(data) == 48 * 32 * 3
        else:
            image = PIL.Image.open(io.BytesIO(data))
            assert (image.format, image.size, image.mode) == (format.value, (48, 32), "RGB")
            assert np.asarray(image).std() > 0
    assert report.peak_memory_bytes > 0
