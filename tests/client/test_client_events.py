"""The client reads what the server wrote: each event comes back as the engine made it."""

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from omni_grpc.client.progress import describe
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Unimplemented
from omni_grpc.types.events import Preempted, Resumed, Retrying
from omni_grpc.types.request import Guidance, GuidanceNorm
from omni_grpc.types.results import Effective
from omni_grpc.v1 import event_pb2, sampling_pb2
from omni_grpc.v1.event_pb2 import EffectiveParams, Heartbeat, JobEvent, StepProgress
from omni_grpc.wire import from_message, read_event
from tests.server.service import serving, until


async def test_every_event_of_a_job_comes_back_as_it_was():
    async with serving() as service:
        job = await service.finished(negative_prompt="", sampling={"guidance": sampling_pb2.Guidance(scale=3.0)})
        read = [read_event(message) for message in await service.watch(job.job_id)]
        entries = service.engine.jobs.get(job.job_id).entries
    assert [type(event) for event in read] == [type(entry.event) for entry in entries]
    for event, entry in zip(read, entries, strict=True):
        # stats are looked at below; the wire counts `elapsed` from `started` on
        for name in entry.event.__dataclass_fields__.keys() - {"stats", "elapsed"}:
            expected = getattr(entry.event, name)
            # seconds travel in whole nanoseconds, noise levels in single precision
            same = pytest.approx(expected, rel=1e-6, abs=1e-8) if isinstance(expected, float) else expected
            assert getattr(event, name) == same
    done, sent = read[-1], entries[-1].event
    assert done.stats.total == pytest.approx(sent.stats.total, abs=1e-8)
    assert (done.stats.steps_run, done.stats.peak_memory_bytes) == (3, 4321)
    assert [warning.code for warning in done.warnings] == ["GUIDANCE_WITHOUT_EFFECT"]


async def test_a_second_attempt_is_told_with_its_reason():
    async with serving() as service:
        service.executor.gates[Lane.PREPARE].close()
        job = await service.create()
        await until(lambda: service.engine.jobs.get(job.job_id).last_seq == 2)
        await service.executor.die()
        service.executor.gates[Lane.PREPARE].open()
        read = [read_event(message) for message in await service.watch(job.job_id)]
    _, first, retrying, _, second, *_ = read
    assert (first.attempt, second.attempt) == (1, 2)
    assert isinstance(retrying, Retrying)
    assert (retrying.failure.reason, retrying.delay) == ("WORKER_DIED", 0)
    assert (retrying.attempt, retrying.max_attempts) == (2, 2)
    assert describe(retrying).startswith("back in the queue for attempt 2 of 2: the worker process 1 ended")


def test_kinds_that_offline_use_does_not_have_are_passed_over():
    for message in (
        JobEvent(heartbeat=Heartbeat()),
        JobEvent(warning=event_pb2.Warning()),
        JobEvent(),
    ):
        assert read_event(message) is None


def test_no_estimate_is_not_zero():
    step = read_event(JobEvent(step_progress=StepProgress(step=1, total_steps=2)))
    assert math.isnan(step.eta)


def test_guidance_that_the_model_does_not_use():
    effective = from_message(Effective, EffectiveParams(image_format=1))
    assert effective.guidance == Guidance()
    assert (effective.guidance.scale, effective.guidance.true_cfg_scale) == (None, 1.0)
    values = {
        "true_cfg_scale": 2, "rescale": 0.5, "interval_start": 0.25, "interval_end": 0.75, "scale_low_noise": 3,
        "boundary_ratio": 0.0,
    }  # fmt: skip
    message = EffectiveParams(image_format=1, guidance=sampling_pb2.Guidance(norm=2, **values))
    assert from_message(Effective, message).guidance == Guidance(norm=GuidanceNorm.RENORM, **values)


def test_a_job_that_was_set_aside():
    aside = JobEvent(preempted=event_pb2.Preempted(completed_steps=3, reason="priority", position=2))
    again = JobEvent(resumed=event_pb2.Resumed(completed_steps=3, wait=Duration(seconds=1, nanos=500_000_000)))
    assert read_event(aside) == Preempted(completed_steps=3, reason="priority", position=2)
    assert read_event(again) == Resumed(completed_steps=3, wait=1.5)
    assert describe(read_event(aside)) == "preempted after 3 steps: priority, 2 ahead of it"
    assert describe(read_event(again)) == "resumed after 3 steps, paused for 1.50 s"


def test_a_server_that_is_newer_is_named_as_the_reason():
    with pytest.raises(Unimplemented, match="ImageFormat \\(99\\)") as caught:
        from_message(Effective, EffectiveParams(image_format=99))
    assert caught.value.reason == "CLIENT_TOO_OLD"
