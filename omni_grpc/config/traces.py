"""Settings of traces. What is not set here is as the standard variables of OpenTelemetry say (OTEL_*)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from urllib.parse import urlsplit

from omni_grpc.config import exposure
from omni_grpc.config.options import setting

GRPC, HTTP = "grpc", "http/protobuf"
TRACES_PATH = "/v1/traces"


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address of a collector: http://HOST:4317, or https://HOST:4317")
    if parts.username or parts.password:
        raise ValueError("has a name and a password in it, which logs would show; give --otlp-headers-file")
    if parts.query or parts.fragment:
        raise ValueError("has more than a path: what a collector asks for goes in --otlp-headers-file")
    return text.rstrip("/")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracesConfig:
    """Where the spans of calls and jobs go. Off where no collector is named, here or by a standard variable."""

    otlp_endpoint: str | None = setting(
        None,
        "traces: collector that spans are sent to by OTLP, http://HOST:4317 or https://HOST:4317 (4318 for "
        "http/protobuf); needs the extra omni-grpc[traces] (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
        read=_endpoint,
        empty="give an address, or leave it out",
    )
    otlp_protocol: str | None = setting(
        None, "traces: how they are sent (default: OTEL_EXPORTER_OTLP_PROTOCOL, else grpc)", choices=(GRPC, HTTP)
    )
    otlp_headers_file: str | None = setting(
        None,
        "traces: file with a line NAME: VALUE for each header of what is sent, such as an authorization (default: "
        "OTEL_EXPORTER_OTLP_HEADERS)",
        empty="give a file, or leave it out",
    )
    trace_sample_ratio: float | None = setting(
        None,
        "traces: share of those that begin here which is sent, 0 to 1; those that callers have begun are as they say "
        "(default: OTEL_TRACES_SAMPLER, else 1)",
        minimum=0,
        maximum=1,
    )

    def collector(self, environ: Mapping[str, str]) -> str | None:
        """The collector that is named, or None. Of several variables the one for traces alone goes first."""
        exporters = environ.get("OTEL_TRACES_EXPORTER", "otlp")
        if self.otlp_endpoint is not None:
            return self.otlp_endpoint
        if "otlp" not in (name.strip() for name in exporters.split(",")):
            return None
        names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        return next((environ[name] for name in names if environ.get(name)), None)

    def protocol(self, environ: Mapping[str, str]) -> str:
        """How spans are sent. Raises ConfigError for a variable that names another way."""
        if self.otlp_protocol is not None:
            return self.otlp_protocol
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if value := environ.get(name):
                if value not in (GRPC, HTTP):
                    raise exposure.refused("otlp_protocol", f"{name} is {value!r}: expected {GRPC} or {HTTP}")
                return value
        return GRPC
