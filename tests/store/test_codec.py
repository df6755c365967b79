"""Records as JSON: every one comes back, whatever is in it, and so do those of other versions."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_grpc.store.records import Entry, JobRecord, JobSpec
from omni_grpc.store.seam import Notice
from omni_grpc.store.sql import codec, rows, tables
from omni_grpc.types import events
from omni_grpc.types.media import Inputs
from tests.store.samples import SPEC, full

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(),
    str: st.text(max_size=8),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    object: JSON,
    type(None): st.none(),
    Inputs: st.just(Inputs()),
}
KINDS = [
    *("Queued", "Started", "Retrying", "EncodeDone", "StepProgress", "Preempted", "Resumed", "DecodeProgress"),
    *("ArtifactReady", "Completed", "Failed", "Cancelled"),
]
"""Names that stand in databases: of a class that is renamed, the old name stays in `codec.KINDS`."""


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, from its hints."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, inner))
    if origin is tuple and inner[1:] == (Ellipsis,):
        return st.lists(values(inner[0]), max_size=2).map(tuple)
    if origin is Sequence:
        return st.lists(values(inner[0]), max_size=2)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})
    assert issubclass(kind, enum.Enum), kind
    return st.sampled_from(kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """What no record of today has."""

    data: bytes
    pair: tuple[int, str]


@pytest.mark.parametrize("kind", [*codec.KINDS.values(), JobSpec, Odd], ids=lambda kind: kind.__name__)
def test_everything_comes_back(kind: type) -> None:
    odd = st.builds(Odd, data=st.binary(), pair=st.tuples(st.integers(), st.text()))
    strategy = odd if kind is Odd else values(kind)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(strategy)
    def comes_back(record: Any) -> None:
        # by repr: NaN is not equal to itself
        assert repr(codec.decode(kind, codec.encode(record))) == repr(record)

    comes_back()


def test_a_spec_is_kept_without_decoded_inputs() -> None:
    spec = full(JobSpec)
    body = codec.encode_spec(spec)
    assert "inputs" not in json.loads(body)["request"]
    without = dataclasses.replace(spec, request=dataclasses.replace(spec.request, inputs=Inputs()))
    assert codec.decode_spec(body) == without
    assert without.request.extra


def test_every_event_has_its_name_for_good() -> None:
    assert list(codec.KINDS) == KINDS
    assert set(codec.KINDS.values()) == set(typing.get_args(events.Event))


def test_every_field_of_a_record_has_a_column() -> None:
    fields = {field.name for field in dataclasses.fields(JobRecord)}
    assert fields | {"ended"} == {column.name for column in tables.jobs.c}
    assert set(rows.SAME) | {"state", "labels", "spec"} == fields


def test_a_field_that_is_unknown_is_passed_over_and_one_that_is_missing_has_its_default() -> None:
    body = json.loads(codec.encode_spec(SPEC))
    del body["segments"], body["request"]["extra"]
    body["from_the_future"] = {"a": [1]}
    body["request"]["guidance"]["also"] = 1
    assert codec.decode_spec(json.dumps(body)) == SPEC


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("Queued", '{"position": 1}', "queue_depth: missing"),
        ("Queued", '{"position": "secret", "queue_depth": 1}', "position: int_parsing"),
        ("Queued", "null", "is empty"),
        ("Queued", "{", "json_invalid"),
        ("Teleported", "{}", "newer version"),
    ],
)
def test_what_cannot_be_read_is_said_without_its_content(kind: str, body: str, says: str) -> None:
    with pytest.raises(codec.Unreadable, match=says) as caught:
        codec.decode_event(kind, body)
    assert "secret" not in str(caught.value)


def test_a_notice_leaves_its_progress_out_where_it_is_too_long() -> None:
    progress = Entry(3, 4.5, dataclasses.replace(full(events.StepProgress), eta=float("nan")))
    notice = Notice(job_id="job-1", seq=2, progress=progress, cancel=True, gone=True)
    sender, found = codec.decode_notice(codec.encode_notice(notice, "me", 8000))
    assert (sender, repr(found)) == ("me", repr(notice))
    long = Notice(
        job_id="job-1",
        progress=Entry(
            3, 4.5, events.Cancelled(reason="\N{SNOWMAN}" * 1400, completed_steps=1, stats=full(events.Stats))
        ),
    )
    text = codec.encode_notice(long, "me", 8000)
    assert len(text.encode()) < 8000
    assert codec.decode_notice(text)[1] == Notice(job_id="job-1")
    with pytest.raises(codec.Unreadable):
        codec.decode_notice("[]")
