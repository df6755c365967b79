"""Every event and record comes back from its message as it was, whatever its values are."""

from __future__ import annotations

import dataclasses
import math
import typing
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_grpc.types import events, lora, results, step_cache
from omni_grpc.types.errors import Unimplemented
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.media import Preview, PreviewImage
from omni_grpc.types.request import Guidance
from omni_grpc.v1 import admin_pb2, event_pb2, media_pb2, options_pb2, sampling_pb2
from omni_grpc.wire import build, from_message, read_event, to_message
from omni_grpc.wire.known import duration, timestamp
from omni_grpc.wire.known import seconds as read_seconds

from .records import FAILURES, records

PAIRS: dict[type, type[Message]] = {
    results.RequestWarning: event_pb2.Warning,
    results.Effective: event_pb2.EffectiveParams,
    results.Stats: event_pb2.GenerationStats,
    results.Artifact: media_pb2.Artifact,
    lora.AppliedLora: event_pb2.AppliedLora,
    step_cache.CacheCount: event_pb2.CacheStats,
    lora.Lora: sampling_pb2.LoraRef,
    step_cache.TeaCache: sampling_pb2.TeaCacheOptions,
    Guidance: sampling_pb2.Guidance,
    Loading: admin_pb2.LoadModelResponse,
    Preview: options_pb2.PreviewOptions,
    PreviewImage: event_pb2.Preview,
}


def declared(module: ModuleType) -> set[type]:
    return {
        kind for kind in vars(module).values() if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }


def sent(message: Message) -> Message:
    """The message as it is on the other side."""
    return type(message).FromString(message.SerializeToString())


def test_nothing_is_left_out_below() -> None:
    assert declared(events) == set(typing.get_args(events.Event))
    assert declared(results) <= PAIRS.keys()


@pytest.mark.parametrize("kind", typing.get_args(events.Event), ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    event = data.draw(records(kind))
    assert read_event(sent(build(event_pb2.JobEvent, event=event))) == event


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_record_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    record = data.draw(records(kind))
    assert from_message(kind, sent(to_message(record, PAIRS[kind]))) == record


def test_a_field_that_is_not_on_the_wire_is_an_error_on_both_sides() -> None:
    grown = dataclasses.make_dataclass("Queued", [("position", int), ("queue_depth", int), ("mood", str)])
    with pytest.raises(TypeError, match=r"Queued\.mood: omni_grpc\.v1\.Queued has no field mood"):
        to_message(grown(1, 2, "good"), event_pb2.Queued)
    with pytest.raises(TypeError, match=r"Queued\.mood: omni_grpc\.v1\.Queued has no field mood"):
        from_message(grown, event_pb2.Queued(position=1))


def test_unset_fields_read_as_the_defaults_of_the_record() -> None:
    assert from_message(Guidance, sampling_pb2.Guidance()) == Guidance()
    assert from_message(lora.Lora, sampling_pb2.LoraRef(lora_id="x")) == lora.Lora(lora_id="x")
    assert from_message(lora.Lora, sampling_pb2.LoraRef(lora_id="x", scale=0)).scale == 0
    assert from_message(results.Artifact, media_pb2.Artifact()).layer is None
    assert from_message(results.Artifact, media_pb2.Artifact(layer=0)).layer == 0


def step(**values: Any) -> events.StepProgress:
    usual = {"step": 1, "total_steps": 2, "sigma": 1.0, "timestep": 1.0, "step_time": 0.5, "elapsed": 0.5, "eta": 0.0}
    return events.StepProgress(**usual | {"rows_total": 1} | values)


def test_what_differs_between_a_record_and_its_message() -> None:
    alone = to_message(step(total_segments=1), event_pb2.StepProgress)
    assert alone.total_segments == 0
    assert from_message(events.StepProgress, alone).total_segments == 1
    assert to_message(step(total_segments=3), event_pb2.StepProgress).total_segments == 3

    unknown = to_message(step(eta=math.nan), event_pb2.StepProgress)
    assert not unknown.HasField("eta")
    assert math.isnan(from_message(events.StepProgress, unknown).eta)
    assert to_message(step(eta=0.0), event_pb2.StepProgress).HasField("eta")

    assert to_message(Guidance(), sampling_pb2.Guidance).norm == sampling_pb2.GUIDANCE_NORM_NONE
    assert to_message(results.Stats(), event_pb2.GenerationStats).HasField("encode"), "zero seconds, not unknown"


@given(records(results.Artifact))
def test_pictures_have_no_playing_time(artifact: results.Artifact) -> None:
    still = dataclasses.replace(artifact, duration=0.0)
    assert not to_message(still, media_pb2.Artifact).HasField("duration")


@given(records(results.Effective))
def test_a_cache_that_the_api_has_no_options_for_is_unset_and_none_is_off(effective: results.Effective) -> None:
    fixed = dataclasses.replace(effective, cache=step_cache.FixedCache("cache_dit"))
    message = to_message(fixed, event_pb2.EffectiveParams)
    assert not message.HasField("cache")
    assert from_message(results.Effective, message).cache is None
    off = to_message(dataclasses.replace(effective, cache=None), event_pb2.EffectiveParams)
    assert off.cache.WhichOneof("kind") == "off"


@given(st.floats(min_value=-1e9, max_value=1e9))
def test_seconds_are_rounded_to_nanoseconds_as_protobuf_does(seconds: float) -> None:
    expected = Duration()
    expected.FromNanoseconds(round(seconds * 1e9))
    assert Duration(**duration(seconds)) == expected
    time = Timestamp(**timestamp(seconds))
    assert abs(time.ToNanoseconds() - Fraction(seconds) * 10**9) <= 1
    assert 0 <= time.nanos < 1_000_000_000


@given(st.floats(min_value=1e9, max_value=4e9))
def test_a_time_comes_back_as_it_was(seconds: float) -> None:
    """Whoever asks for jobs from that of one on gets that job too."""
    assert read_seconds(Timestamp(**timestamp(seconds))) == seconds


@given(records(events.Failed), FAILURES)
def test_what_is_known_beside_a_record_is_sent_with_it_and_wins(event: events.Failed, failure: Any) -> None:
    known = {results.Stats: {"num_gpus": 3, "total": 2.5}, events.Failed: {"retryable": True}}
    message = to_message(event, event_pb2.Failed, lambda record: known.get(type(record), {}))
    assert (message.retryable, message.stats.num_gpus) == (True, 3)
    assert from_message(results.Stats, message.stats).total == 2.5
    job = build(event_pb2.JobEvent, job_id="x", event=event)
    assert (job.job_id, job.failed.retryable, job.HasField("time")) == ("x", False, False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Guidance, sampling_pb2.Guidance(norm=99)),
        (Loading, admin_pb2.LoadModelResponse(phase=99)),
        (Loading, admin_pb2.LoadModelResponse()),
        (results.Effective, event_pb2.EffectiveParams(video_format=99)),
        (results.Effective, event_pb2.EffectiveParams()),
    ],
)
def test_a_number_that_the_client_does_not_know_says_that_it_is_too_old(kind: type, message: Message) -> None:
    with pytest.raises(Unimplemented, match="that this client does not know") as caught:
        from_message(kind, message)
    assert caught.value.reason == "CLIENT_TOO_OLD"
