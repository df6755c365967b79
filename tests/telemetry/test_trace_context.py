"""W3C Trace Context: what is read of headers, and what is told."""

from __future__ import annotations

import pytest

from omni_grpc.types.trace import MAX_STATE, TraceContext, read_trace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # pragma: allowlist secret


def test_it_is_written_as_it_was_read() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    found = read_trace([parent], ["a=1,b=2"])
    assert found == TraceContext(trace_id=TRACE, span_id=SPAN, sampled=True, state="a=1,b=2")
    assert found.headers == (("traceparent", parent), ("tracestate", "a=1,b=2"))


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_the_lowest_flag_says_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    found = read_trace([f"00-{TRACE}-{SPAN}-{flags}"])
    assert found is not None
    assert found.sampled is sampled


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        [f"00-{TRACE}-{SPAN}-01"] * 2,
        [f"00-{TRACE}-{SPAN}"],
        [f"00-{TRACE}-{SPAN}-01-more"],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE.upper()}-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN}-01".encode()],
    ],
)
def test_what_is_none_is_none(parents: list[str | bytes]) -> None:
    assert read_trace(parents) is None


def test_a_later_version_may_have_more() -> None:
    assert read_trace([f"01-{TRACE}-{SPAN}-01-more"]) is not None


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=1,, b=2 "], "a=1,b=2"),
        (["a=\x00"], ""),
        (["a=\xe4"], ""),
        ([f"a={'1' * (MAX_STATE - 2)}", "b=2"], f"a={'1' * (MAX_STATE - 2)}"),
        ([f"a={'1' * MAX_STATE}"], ""),
    ],
)
def test_a_state_is_passed_on_within_its_limit(states: list[str], kept: str) -> None:
    found = read_trace([f"00-{TRACE}-{SPAN}-01"], states)
    assert found is not None
    assert found.state == kept


def test_a_child_has_the_same_id_wherever_it_is_asked_for() -> None:
    ours = TraceContext(trace_id=TRACE, span_id=SPAN, ours=True)
    assert ours.child("job_1") == ours.child("job_1") != ours.child("job_2")
    assert ours.child("job_1").trace_id == TRACE
    other = TraceContext(trace_id=TRACE, span_id=SPAN)
    assert other.child("job_1") is other
