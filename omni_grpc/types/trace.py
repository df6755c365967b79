"""Where a call stands in a distributed trace, as W3C Trace Context has it (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
"""Names of the headers, and of gRPC's metadata."""
MAX_STATE = 512
"""Characters of a tracestate that are passed on; of a longer one the last members are left out."""
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NONE = re.compile("0+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A span of a trace: `trace_id` has 32 hex digits, `span_id` 16. `state` is the tracestate.

    `ours`: this server, or another one of its store, has made that span, and makes more of them below it. Otherwise it
    is passed on as it came.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""
    ours: bool = False

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """What tells the next one of this span."""
        state = ((TRACESTATE, self.state),) if self.state else ()
        return ((TRACEPARENT, self.traceparent), *state)

    def child(self, name: str) -> TraceContext:
        """The span of this name below. It has the same id wherever it is asked for, so that a job that goes on after a
        restart, or on another server, stays one span. Of a trace that is not ours there is none: it stays as it is.
        """
        if not self.ours:
            return self
        span_id = hashlib.sha256(f"{self.trace_id}/{name}".encode()).hexdigest()[:16]
        return dataclasses.replace(self, span_id=span_id)


def read_trace(parents: Sequence[str | bytes], states: Iterable[str | bytes] = ()) -> TraceContext | None:
    """The span that a call comes from, by every value of its two headers. None where there is none, or none that can be
    read: then the standard has a new trace begin.
    """
    if len(parents) != 1 or not isinstance(parents[0], str):
        return None
    found = _PARENT.fullmatch(parents[0].strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or _NONE.fullmatch(trace_id) or _NONE.fullmatch(span_id):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, sampled=bool(int(flags, 16) & 1), state=_state(states))


def _state(values: Iterable[str | bytes]) -> str:
    members: list[str] = []
    size = 0
    for member in (part.strip() for value in values if isinstance(value, str) for part in value.split(",")):
        if not member:
            continue
        if not (member.isascii() and member.isprintable()):
            return ""
        size += len(member) + 1
        if size > MAX_STATE + 1:
            break
        members.append(member)
    return ",".join(members)
