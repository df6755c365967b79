"""Spans to a collector by OTLP, with OpenTelemetry's own exporters. Only this file imports them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from omni_grpc.config import TracesConfig, exposure
from omni_grpc.config.traces import HTTP, TRACES_PATH
from omni_grpc.telemetry.span import Moment, Span
from omni_grpc.types.os_errors import plain
from omni_grpc.types.trace import TraceContext
from omni_grpc.types.version import __version__

KINDS: Mapping[str, SpanKind] = {kind.name: kind for kind in SpanKind}
SCOPE = InstrumentationScope("omni_grpc", __version__)
LAST_SECONDS = 1.0
"""How long an attempt gets to end, once the exporter has been shut down."""
EXPORTERS = "opentelemetry.exporter"
"""Loggers of the exporters, which say each failure, and each attempt."""


class Otlp:
    """A collector. `environ` has the standard variables, which the exporters read for themselves as well."""

    def __init__(self, config: TracesConfig, environ: Mapping[str, str], *, instance: str) -> None:
        """`instance`: the name of this server. Raises ConfigError for a file of headers that cannot be used."""
        headers = None if config.otlp_headers_file is None else _headers(config.otlp_headers_file)
        self._exporter = _exporter(config, environ, headers)
        self._sending = threading.Lock()
        self._said = _Said()
        self._said.attach()
        named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        about = {"service.version": __version__, "service.instance.id": instance}
        self._resource = Resource.create(about if named else {"service.name": "omni_grpc", **about})
        ratio = config.trace_sample_ratio
        given = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        # a provider, since it knows how to read OTEL_TRACES_SAMPLER
        self._sampler: Sampler = TracerProvider(given, self._resource, shutdown_on_exit=False).sampler

    def samples(self, trace_id: str, name: str, parent: TraceContext | None) -> bool:
        """Whether a span is sent, by what its parent says, or if it has none, by the share that is asked for."""
        above = None if parent is None else set_span_in_context(NonRecordingSpan(_context(parent, remote=True)))
        found = self._sampler.should_sample(above, int(trace_id, 16), name, SpanKind.SERVER)
        return found.decision is Decision.RECORD_AND_SAMPLE

    def send(self, spans: Sequence[Span]) -> str | None:
        """Sends them, and waits for that. None, or why they could not be sent."""
        with self._sending:
            self._said.last = ""
            if self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS:
                return None
            return self._said.last or "the collector did not take them"

    def shutdown(self) -> None:
        """Called from another thread than `send`, which may be in the middle of its attempts."""
        self._exporter.shutdown()
        # what is under way ends now, and says so: that is for us, too
        ended = self._sending.acquire(timeout=LAST_SECONDS)
        self._said.detach()
        if ended:
            self._sending.release()

    def _readable(self, span: Span) -> ReadableSpan:
        error = span.error
        return ReadableSpan(
            name=span.name,
            context=_context(span.context, remote=False),
            parent=None if span.parent is None else _context(span.parent, remote=True),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[_event(moment) for moment in span.moments],
            kind=KINDS[span.kind],
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=SCOPE,
        )


class _Said(logging.Handler):
    """Keeps what the exporters say last, for our own line, and keeps it out of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self._logger = logging.getLogger(EXPORTERS)

    def attach(self) -> None:
        self._logger.addHandler(self)
        self._logger.propagate = False

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = not self._logger.handlers

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _exporter(config: TracesConfig, environ: Mapping[str, str], headers: Mapping[str, str] | None) -> SpanExporter:
    endpoint = config.otlp_endpoint
    if config.protocol(environ) == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        if endpoint is not None and not endpoint.endswith(TRACES_PATH):
            endpoint += TRACES_PATH
        return OverHttp(endpoint=endpoint, headers=None if headers is None else dict(headers))
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

    plaintext = None if endpoint is None else endpoint.startswith("http://")
    return OverGrpc(endpoint=endpoint, insecure=plaintext, headers=None if headers is None else tuple(headers.items()))


def _headers(file: str) -> Mapping[str, str]:
    """The headers in a file, one a line. Raises ConfigError, which does not quote them."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = plain(error) if isinstance(error, OSError) else f"{file} is not UTF-8"
        raise exposure.refused("otlp_headers_file", f"--otlp-headers-file cannot be read: {why}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not (colon and name.strip() and value.strip() and line.isascii() and line.isprintable()):
            rule = f"--otlp-headers-file {file}, line {number}: write NAME: VALUE"
            raise exposure.refused("otlp_headers_file", rule)
        # gRPC takes no capitals
        found[name.strip().lower()] = value.strip()
    return found


def _context(trace: TraceContext, *, remote: bool) -> SpanContext:
    state = TraceState.from_header([trace.state]) if trace.state else TraceState()
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), remote, flags, state)


def _event(moment: Moment) -> Event:
    return Event(moment.name, dict(moment.attributes), _nanoseconds(moment.time))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
