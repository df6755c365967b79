"""The spans that are made of a log, with the times of its events."""

from __future__ import annotations

import dataclasses

import pytest

from omni_grpc.store.job import Job
from omni_grpc.store.records import Entry
from omni_grpc.telemetry.job_spans import job_spans
from omni_grpc.telemetry.span import Span
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.events import (
    Cancelled,
    DecodeProgress,
    EncodeDone,
    Event,
    Failed,
    Preempted,
    Queued,
    Resumed,
    Retrying,
    Started,
    StepProgress,
)
from omni_grpc.types.results import Stats
from omni_grpc.types.trace import TraceContext
from tests.webhooks.owed import record

CALL = TraceContext(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331", ours=True)
LOST = Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message="it died")
QUEUED = Queued(position=0, queue_depth=1)
ENCODED = EncodeDone(elapsed=0.25, prompt_tokens=3)


def started(attempt: int = 1) -> Started:
    return Started(model="toy", seeds=(1,), width=64, height=64, total_steps=2, queue_wait=0.0, attempt=attempt)


def step(number: int, total: int = 2) -> StepProgress:
    return StepProgress(
        step=number, total_steps=total, sigma=0.5, timestep=500.0, step_time=0.1, elapsed=0.1, eta=0.1, rows_total=1
    )


def cancelled(steps: int = 0) -> Cancelled:
    return Cancelled(reason="enough", completed_steps=steps, stats=Stats())


def spans(*log: tuple[float, Event], trace: TraceContext | None = CALL) -> dict[str, list[Span]]:
    """The spans of a job with these events, each at its time, by name."""
    one = record()
    job = Job(dataclasses.replace(one, spec=dataclasses.replace(one.spec, trace=trace), state=one.state))
    for seq, (time, event) in enumerate(log, 1):
        job.show(Entry(seq, time, event))
    found: dict[str, list[Span]] = {}
    for span in job_spans(job):
        found.setdefault(span.name, []).append(span)
    return found


def times(*of: Span) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in of]


def test_each_attempt_has_phases_of_its_own() -> None:
    found = spans(
        (1.0, QUEUED), (2.0, started()), (3.0, ENCODED), (4.0, step(1)),
        (5.0, Retrying(failure=LOST, attempt=2, max_attempts=2, delay=1.0)),
        (5.0, QUEUED), (6.0, started(2)), (7.0, ENCODED), (8.0, Failed(failure=LOST, stats=Stats())),
    )  # fmt: skip
    assert times(*found["queue"]) == [(1.0, 2.0), (5.0, 6.0)]
    # an encode may have waited for its turn
    assert times(*found["encode"]) == [(2.75, 3.0), (6.75, 7.0)]
    assert times(*found["denoise"]) == [(3.0, 5.0), (7.0, 8.0)]
    assert [span.error for span in found["denoise"]] == ["WORKER_DIED", "WORKER_DIED"]
    assert [span.attributes["omni_grpc.attempt"] for span in found["denoise"]] == [1, 2]
    (job,) = found["generate_content toy"]
    assert (job.start, job.end, job.error) == (1.0, 8.0, "UNAVAILABLE WORKER_DIED")
    ids = [span.context.span_id for group in found.values() for span in group]
    assert len(set(ids)) == len(ids)


def test_time_set_aside_is_below_the_steps() -> None:
    found = spans(
        (1.0, QUEUED), (2.0, started()), (3.0, ENCODED), (4.0, step(1)),
        (5.0, Preempted(completed_steps=1, reason="priority", position=1)), (6.0, Resumed(completed_steps=1, wait=1.0)),
        (7.0, cancelled(1)),
    )  # fmt: skip
    (preempted,), (denoise,) = found["preempted"], found["denoise"]
    assert times(preempted, denoise) == [(5.0, 6.0), (3.0, 7.0)]
    assert preempted.parent == denoise.context
    assert preempted.attributes["omni_grpc.reason"] == "priority"
    assert denoise.error is None


def test_parts_that_are_decoded_while_others_take_steps_are_events() -> None:
    found = spans(
        (1.0, QUEUED), (2.0, started()), (3.0, ENCODED), (4.0, step(1)),
        (4.5, DecodeProgress(done_units=1, total_units=2)),
        (5.0, step(2)), (5.0, DecodeProgress(done_units=1, total_units=2)), (6.0, cancelled(2)),
    )  # fmt: skip
    (job,), (denoise,), (decode,) = found["generate_content toy"], found["denoise"], found["decode"]
    assert times(denoise, decode) == [(3.0, 5.0), (5.0, 6.0)]
    assert [(moment.name, moment.time) for moment in job.moments] == [("part_decoded", 4.5)]
    assert job.attributes["omni_grpc.completed_steps"] == 2


@pytest.mark.parametrize(
    "trace", [None, dataclasses.replace(CALL, sampled=False), dataclasses.replace(CALL, ours=False)]
)
def test_of_a_trace_that_is_not_sent_there_is_none(trace: TraceContext | None) -> None:
    assert spans((1.0, QUEUED), (2.0, cancelled()), trace=trace) == {}


def test_a_clock_that_was_set_back_makes_no_span_end_before_it_begins() -> None:
    found = spans((5.0, QUEUED), (2.0, started()), (1.0, cancelled()))
    assert all(span.end >= span.start for group in found.values() for span in group)
