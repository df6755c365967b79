"""Settings of the metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from omni_grpc.config import exposure
from omni_grpc.config.options import setting
from omni_grpc.types.address import MAX_PORT, is_unix, listen_host

HOST = "127.0.0.1"
NEED_PORT = ("metrics_host",)
"""Settings that are about the port of the metrics."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """What is measured while the server runs, and where Prometheus can read it."""

    enable_metrics: bool = setting(
        True, "measure, and serve the figures as /metrics on the HTTP port and on --metrics-port"
    )
    metrics_port: int | None = setting(
        None,
        "metrics: port that serves /metrics alone, without asking who calls; 0 picks a free one (default: none)",
        minimum=0,
        maximum=MAX_PORT,
    )
    metrics_host: str | None = setting(
        None, f"metrics: host name or IP address of --metrics-port (default: {HOST})", read=listen_host
    )
    metrics_tenants: int = setting(
        20,
        "metrics: tenants that have figures of their own, those with the most jobs; the others count as one, `other`",
        minimum=0,
    )

    def __post_init__(self) -> None:
        idle = [name for name in NEED_PORT if getattr(self, name) is not None] if self.metrics_port is None else []
        if idle:
            message = f"{exposure.flag_of(idle[0])} has no effect without --metrics-port"
            raise exposure.refused(idle[0], message, reason="SETTING_WITHOUT_EFFECT")
        if self.metrics_port is not None and not self.enable_metrics:
            message = "--metrics-port has no effect with --no-enable-metrics; leave one of them out"
            raise exposure.refused("metrics_port", message, reason="SETTING_WITHOUT_EFFECT")
        if self.metrics_host is not None and is_unix(self.metrics_host):
            raise exposure.refused("metrics_host", "--metrics-host is a Unix socket: Prometheus needs a host")

    @property
    def host(self) -> str:
        """The host to listen on."""
        return HOST if self.metrics_host is None else self.metrics_host

    @property
    def addresses(self) -> Iterator[tuple[str, str]]:
        """The settings that name an address to listen on, and their values."""
        if self.metrics_port is not None:
            yield "metrics_host", self.host
