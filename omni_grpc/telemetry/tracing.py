"""Traces of a server: the span of each call while it is open, those of a job at its end, those of webhooks."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Protocol

from omni_grpc.config import TracesConfig
from omni_grpc.engine import Job
from omni_grpc.telemetry.exporting import Exporting, Limits, Sink
from omni_grpc.telemetry.job_spans import job_spans
from omni_grpc.telemetry.span import CLIENT, SERVER, Attributes, Span, Value
from omni_grpc.types.errors import Code, ConfigError, Violation
from omni_grpc.types.trace import TraceContext
from omni_grpc.webhooks.sender import Attempt

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long the last spans get to be sent when a server ends."""
FAULTS = frozenset({Code.INTERNAL, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED})
"""Codes that are the fault of the one who answers, as the conventions for spans of gRPC servers have it."""


class Collector(Sink, Protocol):
    """Where spans go, and which."""

    def samples(self, trace_id: str, name: str, parent: TraceContext | None) -> bool: ...


class CallSpan:
    """The span of a call. `trace` is its context, None where the call belongs to no trace."""

    def __init__(self, name: str, kind: Attributes, trace: TraceContext | None, parent: TraceContext | None) -> None:
        self._name = name
        self.trace = trace
        self.attributes: dict[str, Value] = dict(kind)
        self._parent = parent
        self._start = time.time()

    def ended(self, code: str, error: str | None) -> Span:
        """`code`: how the call ended, by gRPC's name; `error`: the reason, where it is the server's fault."""
        assert self.trace is not None
        self.attributes["rpc.response.status_code"] = code
        if error is not None:
            self.attributes["error.type"] = error
        return Span(
            name=self._name,
            context=self.trace,
            parent=self._parent,
            start=self._start,
            end=time.time(),
            kind=SERVER,
            attributes=self.attributes,
            error=error,
        )


class Tracing:
    """It begins spans and hands them over when they end. Without a collector, calls keep the trace that they came with,
    and nothing is made of it.
    """

    def __init__(self, collector: Collector | None = None, *, where: str = "", limits: Limits | None = None) -> None:
        self._collector = collector
        self._exporting = None if collector is None else Exporting(collector, where=where, limits=limits)

    @classmethod
    def of(cls, config: TracesConfig, environ: Mapping[str, str], *, instance: str) -> Tracing:
        """That of a server. Raises ConfigError where the packages for it are missing (PACKAGE_MISSING), and for
        settings that cannot be used.
        """
        where = config.collector(environ)
        if where is None or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            if config.otlp_endpoint is not None:
                logger.warning("no traces are sent, since OTEL_SDK_DISABLED is set")
            return cls()
        try:
            from omni_grpc.telemetry.otlp import Otlp
        except ModuleNotFoundError as error:
            message = f"traces need the package {error.name}: pip install 'omni-grpc[traces]'"
            if config.otlp_endpoint is not None:
                raise ConfigError(
                    message, reason="PACKAGE_MISSING", violations=(Violation("otlp_endpoint", message),)
                ) from error
            # variables for all programs of a machine may say it, and are no order to this one
            logger.warning("no traces are sent to %s, which OTEL_EXPORTER_OTLP_ENDPOINT names: %s", where, message)
            return cls()
        collector = Otlp(config, environ, instance=instance)
        logger.info("traces go to %s by %s", where, config.protocol(environ))
        return cls(collector, where=where, limits=_limits(environ))

    @property
    def on(self) -> bool:
        return self._collector is not None

    @property
    def sent(self) -> int:
        """Spans that the collector has taken."""
        return 0 if self._exporting is None else self._exporting.sent

    @property
    def dropped(self) -> int:
        """Spans that it has not."""
        return 0 if self._exporting is None else self._exporting.dropped

    def begin(self, name: str, parent: TraceContext | None, attributes: Attributes) -> CallSpan:
        """The span of a call that begins now. `parent` is what it came with."""
        if self._collector is None:
            return CallSpan(name, attributes, parent, parent)
        trace_id = parent.trace_id if parent is not None else _random(16)
        trace = TraceContext(
            trace_id=trace_id,
            span_id=_random(8),
            sampled=self._collector.samples(trace_id, name, parent),
            state=parent.state if parent is not None else "",
            ours=True,
        )
        return CallSpan(name, attributes, trace, parent)

    def end(self, span: CallSpan, code: str, reason: str = "") -> None:
        """Ends the span of a call. `reason` is that of its error, empty where it has none."""
        if self._exporting is None or span.trace is None or not span.trace.sampled:
            return
        made = span.ended(code, reason if code in FAULTS else None)
        self._exporting.give(lambda: (made,))

    def job_ended(self, job: Job) -> None:
        """An observer of jobs that end."""
        trace = job.record.trace
        if self._exporting is not None and trace is not None and trace.ours and trace.sampled:
            self._exporting.give(lambda: job_spans(job))

    def webhook(self, attempt: Attempt) -> None:
        """An observer of attempts to deliver a webhook."""
        trace = attempt.trace
        if self._exporting is None or trace is None or not (trace.ours and trace.sampled):
            return
        delivery = attempt.delivery
        attributes: dict[str, Value] = {
            "http.request.method": "POST",
            # not the whole address, in which receivers hide secrets
            "server.address": delivery.host,
            "omni_grpc.job.id": delivery.job_id,
            "omni_grpc.job.state": delivery.state.value,
            "http.request.resend_count": delivery.attempts,
        }
        if attempt.status is not None:
            attributes["http.response.status_code"] = attempt.status
        if delivery.tenant:
            attributes["omni_grpc.tenant"] = delivery.tenant
        span = Span(
            name="webhook",
            context=trace,
            parent=delivery.trace,
            start=attempt.began,
            end=max(attempt.began, attempt.ended),
            kind=CLIENT,
            attributes=attributes,
            error=attempt.failed,
        )
        self._exporting.give(lambda: (span,))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Sends what is left, for so many seconds at most. Blocks."""
        if self._exporting is not None:
            self._exporting.close(timeout)


def _random(size: int) -> str:
    """An id of so many bytes, in hex; one of zeros means none."""
    while not (found := secrets.token_bytes(size)).strip(b"\0"):
        pass
    return found.hex()


def _limits(environ: Mapping[str, str]) -> Limits:
    """The standard variables of the queue. Raises ConfigError for one that is no number."""

    def number(name: str, usual: int) -> int:
        if not (value := environ.get(name)):
            return usual
        if not value.isdecimal() or not int(value):
            message = f"{name} is {value!r}: expected a whole number above 0"
            raise ConfigError(message, violations=(Violation("otlp_endpoint", message),))
        return int(value)

    return Limits(
        most=number("OTEL_BSP_MAX_QUEUE_SIZE", 2048),
        batch=number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
        delay=number("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000,
    )
