"""The rules of a stream that is lost and taken up again, without a network."""

import pytest

from omni_grpc.client.channel import Deadline, Reconnect
from omni_grpc.client.failure import CallFailure
from omni_grpc.client.watch import WatchState
from omni_grpc.types.errors import (
    Code,
    DeadlineExceeded,
    Failure,
    InternalError,
    NotFound,
    Unavailable,
)
from omni_grpc.v1.event_pb2 import Cancelled, Completed, Heartbeat, JobEvent, Queued, StepProgress
from omni_grpc.v1.job_pb2 import WatchJobRequest
from omni_grpc.v1.media_pb2 import ArtifactChunk
from omni_grpc.v1.options_pb2 import ARTIFACT_DELIVERY_INLINE_CHUNKS

QUICK = Reconnect(attempts=3, first_delay=0.0)


def ended(code, *, reason="", from_server=False):
    return CallFailure(Failure(code=code, reason=reason or code.value, message="gone"), from_server)


def watch(**at):
    return WatchState(QUICK, ARTIFACT_DELIVERY_INLINE_CHUNKS, **at)


def step(seq):
    return JobEvent(job_id="job_1", seq=seq, step_progress=StepProgress(step=seq, total_steps=9))


def test_events_are_taken_once_and_in_order():
    position = watch()
    assert position.accept(JobEvent(job_id="job_1", seq=1, queued=Queued()))
    assert position.accept(step(4))
    assert not position.accept(step(4))
    assert not position.accept(step(3))
    assert not position.accept(JobEvent(job_id="job_1", heartbeat=Heartbeat()))
    expected = WatchJobRequest(job_id="job_1", after_seq=4, delivery=ARTIFACT_DELIVERY_INLINE_CHUNKS)
    assert position.request() == expected


def test_a_call_that_was_refused_is_not_repeated():
    with pytest.raises(NotFound):
        watch(job_id="job_1").lost(ended(Code.NOT_FOUND, from_server=True))
    with pytest.raises(Unavailable):
        watch().lost(ended(Code.UNAVAILABLE))


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.INTERNAL])
def test_attempts_are_bounded_and_any_message_renews_them(code):
    position = watch()
    position.accept(step(1))
    for _ in range(3):
        position.lost(ended(code))
    with pytest.raises(Unavailable) as caught:
        position.lost(ended(code))
    assert caught.value.reason == "STREAM_LOST"
    assert caught.value.failure.metadata == {"job_id": "job_1", "after_seq": "1"}
    assert "watch_job('job_1', after_seq=1)" in str(caught.value)
    position.accept(JobEvent(job_id="job_1", heartbeat=Heartbeat()))
    assert position.lost(ended(code)) == 0.0


def test_a_server_that_names_a_time_is_not_asked_before_it():
    position = watch()
    position.accept(step(1))
    busy = Failure(code=Code.UNAVAILABLE, reason="STARTING", message="x", retry_after=3.0)
    assert position.lost(CallFailure(busy, from_server=True)) == 3.0


def test_an_error_of_the_server_is_raised_as_it_is():
    position = watch()
    position.accept(step(1))
    with pytest.raises(InternalError) as caught:
        position.lost(ended(Code.INTERNAL, reason="BUG", from_server=True))
    assert caught.value.reason == "BUG"


def test_a_server_that_forgot_the_job_has_restarted():
    position = watch()
    position.accept(step(1))
    position.lost(ended(Code.UNAVAILABLE))
    with pytest.raises(Unavailable, match="has restarted") as caught:
        position.lost(ended(Code.NOT_FOUND, from_server=True))
    assert caught.value.reason == "JOB_LOST"
    assert caught.value.failure.retryable


def test_the_deadline_of_the_call_says_how_far_the_job_was():
    position = watch()
    position.accept(step(2))
    with pytest.raises(DeadlineExceeded, match="after event 2 of job job_1") as caught:
        position.lost(ended(Code.DEADLINE_EXCEEDED))
    assert caught.value.failure.metadata == {"job_id": "job_1", "after_seq": "2"}


def test_bytes_without_an_artifact_break_the_protocol():
    position = watch()
    with pytest.raises(InternalError) as caught:
        position.accept(JobEvent(job_id="job_1", seq=1, artifact_chunk=ArtifactChunk(artifact_id="art_9")))
    assert caught.value.reason == "PROTOCOL_ERROR"


def test_how_a_job_ended():
    position = watch()
    assert position.error() is None
    position.accept(JobEvent(job_id="job_1", seq=1, cancelled=Cancelled(reason="enough", completed_steps=3)))
    error = position.error()
    assert error is not None
    assert (error.code, error.reason) == (Code.CANCELLED, "JOB_CANCELLED")
    assert "after 3 steps: enough" in str(error)
    done = watch()
    done.accept(JobEvent(job_id="job_1", seq=1, completed=Completed()))
    assert done.error() is None


def test_pauses_grow_to_a_limit_and_differ():
    policy = Reconnect(first_delay=1.0, longest_delay=4.0)
    for attempt, longest in enumerate([1.0, 2.0, 4.0, 4.0, 4.0]):
        delays = {policy.delay(attempt) for _ in range(50)}
        assert longest / 2 <= min(delays) < max(delays) <= longest


def test_a_deadline_shortens_what_comes_after_it():
    assert Deadline(None).remaining() is None
    assert Deadline(None).within(3.0) == 3.0
    assert Deadline(0.0).remaining() == 0.0
    assert Deadline(0.0).within(3.0) == 0.0
    assert Deadline(60.0).within(3.0) == 3.0
