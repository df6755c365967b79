"""Recordings of a real worker: the steps that are in the trace, and that nothing of them fails a step."""

import gzip
import json

import pytest

from omni_grpc.types import shared_memory as shared
from omni_grpc.types.plan import (
    EndRecording,
    Plan,
    Prepared,
    ProfileFileKind,
    Ready,
    Record,
    Recorded,
    RecordingEnd,
    Stepped,
)

from .test_worker import config, request, worker

__all__ = ["config", "worker"]


def until(reports, kind):
    while not isinstance(report := reports.get(timeout=60), kind):
        pass
    return report


def steps(it, reports, count):
    for _ in range(count):
        it.submit(Plan(step=("job_1",)))
    assert all(not until(reports, Stepped).broken for _ in range(count))


@pytest.fixture
def stepping(worker):
    it, reports, checkpoint, config = worker
    until(reports, Ready)
    it.submit(Plan(admit=(request(checkpoint, config, steps=12),)))
    until(reports, Prepared)
    return it, reports


def trace_of(recorded):
    trace, table = recorded.files
    assert (trace.kind, table.kind) == (ProfileFileKind.TRACE, ProfileFileKind.OPS)
    assert "Self CPU" in shared.take(table.data).decode()
    return json.loads(gzip.decompress(shared.take(trace.data)))["traceEvents"]


def test_so_many_steps_are_recorded_from_the_one_that_was_asked_for_on(stepping):
    it, reports = stepping
    it.order(Record(id="prf_1", activities=("cpu",), start_step=1, num_steps=2))
    steps(it, reports, 5)
    recorded = until(reports, Recorded)
    assert (recorded.id, recorded.steps, recorded.end) == ("prf_1", 2, RecordingEnd.STEPS)
    names = [event["name"] for event in trace_of(recorded)]
    assert sorted(name for name in names if name.startswith("step ")) == ["step 0 of job_1", "step 1 of job_1"]
    assert any(name.startswith(("aten::", "omni_grpc::")) for name in names)


def test_a_recording_of_another_job_has_none_of_these_steps(stepping):
    it, reports = stepping
    it.order(Record(id="prf_1", activities=("cpu",), job_id="job_2"))
    steps(it, reports, 2)
    it.order(EndRecording(id="prf_0", end=RecordingEnd.STOPPED))
    it.order(EndRecording(id="prf_1", end=RecordingEnd.TIME_LIMIT))
    recorded = until(reports, Recorded)
    assert (recorded.id, recorded.steps, recorded.files) == ("prf_1", 0, ())
    assert recorded.end is RecordingEnd.TIME_LIMIT


def test_what_goes_wrong_with_a_recording_is_its_failure_and_not_that_of_a_step(stepping):
    it, reports = stepping
    it.order(Record(id="prf_1", activities=("cpu",), job_id="job_1", memory=True, num_steps=1))
    it.submit(Plan(step=("job_1",)))
    found = {type(report): report for report in (reports.get(timeout=60) for _ in range(2))}
    assert found[Recorded].failure is not None, "there is no device memory on a CPU"
    assert not found[Stepped].broken
    steps(it, reports, 1)
