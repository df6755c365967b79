"""The trace that a call belongs to: the span that is active in this program, where it uses OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from omni_grpc.types.trace import TRACEPARENT, TraceContext, read_trace


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata of a call that is made now. Empty where no span is active: a program that has never imported
    OpenTelemetry has none, and nothing is imported to find that out.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    span = api.get_current_span().get_span_context()
    if not span.is_valid:
        return ()
    found = TraceContext(
        trace_id=f"{span.trace_id:032x}",
        span_id=f"{span.span_id:016x}",
        sampled=bool(span.trace_flags & 1),
        state=span.trace_state.to_header(),
    )
    return tuple(found.headers)


def trace_id_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The id of the trace that the server says a call belongs to, in the initial metadata; "" where there is none."""
    found = read_trace([value for name, value in metadata or () if name == TRACEPARENT])
    return "" if found is None else found.trace_id
