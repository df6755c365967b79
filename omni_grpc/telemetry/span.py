"""A span as we make it, before it is one of OpenTelemetry's: plain data, so that nothing is imported for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from omni_grpc.types.trace import TraceContext

Value = str | int | float | bool
Attributes = Mapping[str, Value]

SERVER, CLIENT, INTERNAL = "SERVER", "CLIENT", "INTERNAL"
"""Kinds of a span, by OpenTelemetry's names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened within a span. `time` is in Unix seconds."""

    name: str
    time: float
    attributes: Attributes = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended. `context` is itself, `parent` the one above, which another process may have made; None
    for the first of a trace. Times in Unix seconds. `error`: why it failed, None where it did not.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    start: float
    end: float
    kind: str = INTERNAL
    attributes: Attributes = dataclasses.field(default_factory=dict)
    moments: Sequence[Moment] = ()
    error: str | None = None
