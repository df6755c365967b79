"""The runner with a real model: what one request gets does not depend on who shares its steps."""

import dataclasses
import hashlib
import io
import itertools
import threading

import numpy as np
import PIL.Image
import pytest
import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import LimitsConfig
from omni_grpc.loading.loader import Loader
from omni_grpc.pipeline.batch import assemble
from omni_grpc.pipeline.preview import latent_preview
from omni_grpc.pipeline.schedule import Levels, Schedule
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, InternalError
from omni_grpc.types.media import ImageFormat, Preview
from omni_grpc.types.request import Draft, GuidanceDraft, GuidanceNorm
from omni_grpc.types.results import RequestWarning
from omni_grpc.worker import packed
from omni_grpc.worker.lanes import Lanes
from omni_grpc.worker.packed import PackedRunner

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

    return QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.float32))


@pytest.fixture
def runner(pipeline, request):
    return PackedRunner(pipeline, torch.device("cpu"), f"omni-test-{abs(hash(request.node.name)):x}-")


def requests(checkpoint, drafts=UNLIKE):
    facts = ServingFacts(checkpoint, LimitsConfig())
    return [
        resolve_request(Draft(model="tiny", **draft), facts, id=f"job_{i}").request for i, draft in enumerate(drafts)
    ]


def latents(runner, job_id):
    return [state.latents for state in runner._held[job_id].states]


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
        assert {progress.evals for progress in steps} == {1}
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


def test_packed_constants_are_made_once_for_the_steps_of_the_same_requests(runner, checkpoint):
    first, second, _ = requests(checkpoint)
    runner.prepare(first)
    runner.prepare(second)
    runner.step((first.id, second.id))
    packed = runner._rows["txt"]
    runner.step((first.id, second.id))
    assert runner._rows["txt"] is packed
    runner.step((second.id,))
    assert runner._rows["txt"] is not packed


def test_a_request_that_is_dropped_as_its_batch_is_made_ends_in_silence(runner, checkpoint, monkeypatch):
    """Another lane drops it between the making of the batch and its forward."""
    (request,) = requests(checkpoint, UNLIKE[:1])
    runner.prepare(request)

    def assemble_and_drop(*arguments):
        rows = assemble(*arguments)
        # what the other lane does, right after the batch was kept
        monkeypatch.setattr(type(runner), "_rows", property(lambda self: None, lambda self, value: None), raising=False)
        return rows

    monkeypatch.setattr(packed, "assemble", assemble_and_drop)
    report = runner.step((request.id,))
    assert report.broken == ()
    assert [progress.step for progress in report.progress] == [1]


def test_a_request_dropped_during_its_step_is_not_held_by_the_batch(runner, checkpoint, pipeline, monkeypatch):
    request = requests(checkpoint)[0]
    runner.prepare(request)
    predict = pipeline.predict

    def predict_and_drop(batch):
        runner.drop((request.id,))
        return predict(batch)

    monkeypatch.setattr(pipeline, "predict", predict_and_drop)
    runner.step((request.id,))
    assert runner._rows is None


def test_a_dropped_request_takes_no_more_steps_and_its_neighbour_goes_on(runner, checkpoint):
    first, second, _ = requests(checkpoint)
    runner.prepare(first)
    runner.prepare(second)
    runner.step((first.id, second.id))
    runner.drop((first.id,))
    report = runner.step((first.id, second.id))
    assert [progress.id for progress in report.progress] == [second.id]
    assert runner.step((first.id,)).progress == ()


def poison(pipeline, monkeypatch, width, error):
    """Makes every forward fail that has a row of this width in it."""
    predict = pipeline.predict

    def predict_or_fail(batch):
        if any(state.request.width == width for state, _ in batch.owners):
            raise error
        return predict(batch)

    monkeypatch.setattr(pipeline, "predict", predict_or_fail)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"),
        (RuntimeError("shape mismatch"), Code.INTERNAL, "WORKER_ERROR"),
    ],
)
def test_a_request_that_breaks_a_shared_forward_fails_alone(
    runner, checkpoint, pipeline, monkeypatch, error, code, reason
):
    first, bad, third = requests(checkpoint)
    solo = {request.id: run_alone(runner, request) for request in (first, third)}
    for request in (first, bad, third):
        runner.prepare(request)
    poison(pipeline, monkeypatch, bad.width, error)
    report = runner.step((first.id, bad.id, third.id))
    assert [progress.id for progress in report.progress] == [first.id, third.id]
    (broken,) = report.broken
    assert (broken.id, broken.phase, broken.failure.code, broken.failure.reason) == (bad.id, "step", code, reason)
    assert bad.id not in runner._held, "a failed request holds no memory"
    for request in (first, third):
        for _ in range(request.steps - 1):
            runner.step((request.id,))
        torch.testing.assert_close(latents(runner, request.id)[0], solo[request.id][0], rtol=0, atol=1e-5)


def test_latents_that_stop_being_finite_fail_their_request_at_that_step(runner, checkpoint, pipeline, monkeypatch):
    good, bad, _ = requests(checkpoint)
    runner.prepare(good)
    runner.prepare(bad)
    runner.step((good.id, bad.id))
    predict = pipeline.predict

    def predict_nan(batch):
        out = predict(batch).clone()
        for row, (state, _) in enumerate(batch.owners):
            if state.request.id == bad.id and state.output == 1:
                out[batch.stream("img").slice(row)][0, 0] = torch.nan
        return out

    monkeypatch.setattr(pipeline, "predict", predict_nan)
    report = runner.step((good.id, bad.id))
    assert [progress.id for progress in report.progress] == [good.id]
    assert report.broken[0].failure.reason == "NON_FINITE_LATENTS"
    assert "after step 2" in report.broken[0].failure.message
    assert bad.id not in runner._held


def test_a_failing_update_is_its_requests_failure(runner, checkpoint, pipeline, monkeypatch):
    good, bad, _ = requests(checkpoint)
    runner.prepare(good)
    runner.prepare(bad)

    def refuse(*arguments):
        raise ValueError("index 51 is out of bounds")

    monkeypatch.setattr(runner._held[bad.id].states[1].schedule, "skip", refuse)
    report = runner.step((good.id, bad.id))
    assert [progress.id for progress in report.progress] == [good.id]
    assert report.broken[0].failure.reason == "WORKER_ERROR"


def test_pixels_that_are_not_finite_are_an_error_not_a_black_image(runner, checkpoint):
    request = requests(checkpoint)[0]
    run_alone(runner, request)
    (state,) = runner._held[request.id].states
    state.latents = state.latents.clone().index_fill_(0, torch.tensor(0), torch.nan)
    with pytest.raises(InternalError, match="not finite"):
        runner.decode(request.id)


def guided(checkpoint, **guidance):
    asked = {"prompt": "a ring", "negative_prompt": "", "width": 32, "height": 32, "steps": 4, "seeds": (3,)}
    return requests(checkpoint, [asked | {"guidance": GuidanceDraft(true_cfg_scale=4.0, **guidance)}])[0]


def test_outside_of_its_interval_guidance_makes_no_second_prediction(runner, checkpoint):
    request = guided(checkpoint, interval_start=0.25, interval_end=0.75)
    runner.prepare(request)
    rows = [runner.step((request.id,)).progress[0].rows for _ in range(4)]
    assert rows == [1, 2, 2, 1]
    within = latents(runner, request.id)[0]
    whole = run_alone(runner, guided(checkpoint))[0]
    nothing = run_alone(runner, guided(checkpoint, interval_start=0.9, interval_end=0.95))[0]
    off = run_alone(
        runner, requests(checkpoint, [{"prompt": "a ring", "width": 32, "height": 32, "steps": 4, "seeds": (3,)}])[0]
    )[0]
    torch.testing.assert_close(nothing, off, rtol=0, atol=1e-5)
    assert not torch.allclose(within, whole)
    assert not torch.allclose(within, off)


def test_unlike_guidance_shares_a_batch(runner, checkpoint):
    kinds = [
        {},
        {"rescale": 0.7, "norm": GuidanceNorm.NONE},
        {"norm": GuidanceNorm.RENORM_CLIPPED},
        {"norm": GuidanceNorm.NONE},
    ]
    kinds.append({"interval_start": 0.5})
    asked = [dataclasses.replace(guided(checkpoint, **kind), id=f"job_{i}") for i, kind in enumerate(kinds)]
    alone = [run_alone(runner, request)[0] for request in asked]
    for one, other in itertools.combinations(alone, 2):
        assert not torch.allclose(one, other, atol=1e-4), "each kind of guidance changes the result"
    for request in asked:
        runner.prepare(request)
    for _ in range(4):
        runner.step(tuple(request.id for request in asked))
    for request, solo in zip(asked, alone, strict=True):
        torch.testing.assert_close(latents(runner, request.id)[0], solo, rtol=0, atol=1e-5)


@pytest.mark.parametrize("format", [ImageFormat.WEBP, ImageFormat.JPEG, ImageFormat.PNG])
def test_previews_come_at_the_rate_and_size_that_was_asked(runner, checkpoint, format):
    preview = Preview(every_steps=2, max_edge_px=64, format=format)
    asked = {"prompt": "x", "width": 64, "height": 32, "steps": 5, "seeds": (1, 2), "preview": preview}
    (request,) = requests(checkpoint, [asked])
    without = run_alone(runner, dataclasses.replace(request, preview=None))
    runner.prepare(request)
    reports = [runner.step((request.id,)).progress[0] for _ in range(5)]
    assert [len(report.previews) for report in reports] == [0, 2, 0, 2, 0]
    pictures = []
    for index, picture in enumerate(reports[1].previews):
        image = PIL.Image.open(io.BytesIO(picture.data))
        assert (picture.index, picture.mime_type) == (index, format.mime_type)
        assert (image.format, image.size) == (format.value, (64, 32))
        assert (picture.width, picture.height) == (64, 32)
        pictures.append(np.asarray(image))
    assert not np.array_equal(*pictures)
    assert pictures[0].std() > 1
    assert all(torch.equal(a, b) for a, b in zip(without, latents(runner, request.id), strict=True))


@pytest.mark.parametrize(
    ("scheduler", "evaluations"), [("FlowMatchEulerDiscreteScheduler", 4), ("FlowMatchHeunDiscreteScheduler", 7)]
)
def test_a_preview_shows_where_the_step_leads(runner, checkpoint, monkeypatch, scheduler, evaluations):
    """Four steps, of one evaluation each or of two."""
    asked = {"prompt": "x", "width": 128, "height": 64, "steps": evaluations, "seeds": (1,)}
    (request,) = requests(checkpoint, [asked | {"preview": Preview(max_edge_px=16, format=ImageFormat.RAW_RGB8)}])
    (state,) = runner._pipeline.prepare(request)
    schedule = Schedule(checkpoint.configs["scheduler"], Levels(steps=4, mu=0.7), device="cpu", name=scheduler)
    state.schedule = schedule
    monkeypatch.setattr(runner._pipeline, "prepare", lambda request: [state])
    runner.prepare(request)
    for step in range(4):
        before = state.latents
        while not (done := runner.step((request.id,)).progress):
            pass
        sigma, following = schedule.sigmas[step : step + 2]
        clean = state.latents - following * (before - state.latents) / (sigma - following)
        expected = latent_preview(state.grid.unpack(clean)[:, 0], None)
        (picture,) = done[0].previews
        shown = np.frombuffer(picture.data, np.uint8).reshape(expected.shape)
        # a last digit may turn to the other side
        assert np.abs(shown.astype(int) - expected).max() <= 1, step
    runner.drop([request.id])


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


def test_prepares_and_decodes_wait_while_another_lane_is_alone(pipeline, checkpoint):
    lanes = Lanes()
    runner = PackedRunner(pipeline, torch.device("cpu"), "omni-test-alone-", lanes=lanes)
    request = requests(checkpoint)[0]
    waited = []

    def beside(work, *arguments):
        thread = threading.Thread(target=work, args=arguments)
        with lanes.exclusive() as quiet:
            assert quiet
            thread.start()
            thread.join(0.2)
            waited.append(thread.is_alive())
        thread.join(60)
        assert not thread.is_alive()

    beside(runner.prepare, request)
    for _ in range(request.steps):
        runner.step((request.id,))
    beside(runner.decode_part, request.id)
    beside(runner.decode, request.id)
    assert waited == [True, True, True]


def test_a_warning_that_comes_after_the_load_is_in_the_replies_from_then_on(pipeline, checkpoint):
    first, second = (RequestWarning(code=code, field="", message=code) for code in ("KNOWN", "LATE"))
    warnings = [first]
    runner = PackedRunner(pipeline, torch.device("cpu"), "omni-test-warned-", warnings=warnings)
    told = []
    for request in requests(checkpoint)[:2]:
        run_alone(runner, request)
        told.append([warning.code for warning in runner.decode(request.id).warnings])
        warnings.append(second)
    assert told == [[], ["LATE"]]
