"""Settings of the HTTP port."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from urllib.parse import urlsplit

from omni_grpc.config import exposure
from omni_grpc.config.options import setting
from omni_grpc.types.address import MAX_PORT, is_unix, listen_host

ANY = "*"
"""The entry of `http_origins` that stands for every origin."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Connect, gRPC-Web, files, OpenAI's endpoints and the page, all on one port."""

    http_port: int | None = setting(
        None,
        "HTTP: port for browsers, Connect, gRPC-Web, JSON, files and OpenAI clients; 0 picks a free one (default: "
        "none)",
        minimum=0,
        maximum=MAX_PORT,
    )
    http_host: str | None = setting(
        None,
        "HTTP: host name or IP address to listen on (default: that of --host; 127.0.0.1 beside a Unix socket)",
        read=listen_host,
    )
    http_origins: tuple[str, ...] = setting(
        (),
        "HTTP: origins, such as https://studio.example, whose pages may call this server (CORS), separated by commas; "
        "* for all (default: only pages that come from this port)",
    )
    http_url: str | None = setting(
        None,
        "HTTP: address at which clients reach the port, such as https://images.example; addresses of outputs begin "
        "with it (default: the address it listens on)",
        empty="give an address, or leave it out",
    )
    http_key_file: str | None = setting(
        None,
        "HTTP: file with 32 bytes or more that addresses of outputs are signed with; several servers behind one "
        "address share it (default: a key of this process)",
        empty="give a file, or leave it out",
    )

    def __post_init__(self) -> None:
        if self.http_port is None:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    flag = exposure.flag_of(field.name)
                    raise exposure.refused(
                        field.name, f"{flag} has no effect without --http-port", reason="SETTING_WITHOUT_EFFECT"
                    )
        if self.http_host is not None and is_unix(self.http_host):
            raise exposure.refused("http_host", "--http-host is a Unix socket: browsers need a host and a port")
        for origin in self.http_origins:
            _check_origin("http_origins", origin)
        if self.http_url is not None:
            _check_origin("http_url", self.http_url.rstrip("/"))

    @property
    def on(self) -> bool:
        return self.http_port is not None

    def host(self, beside: str) -> str:
        """The host to listen on, beside the gRPC port's."""
        if self.http_host is not None:
            return self.http_host
        return "127.0.0.1" if is_unix(beside) else beside

    def addresses(self, beside: str) -> Iterator[tuple[str, str]]:
        """The settings that name an address to listen on, and their values."""
        if self.on:
            yield ("host" if self.http_host is None else "http_host"), self.host(beside)


def _check_origin(name: str, origin: str) -> None:
    """Raises ConfigError unless it is a scheme and a host, perhaps with a port."""
    if origin == ANY and name == "http_origins":
        return
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts._replace(scheme="", netloc="").geturl():
        raise exposure.refused(
            name, f"{exposure.flag_of(name)}: {origin!r} is no origin: write https://HOST or http://HOST:PORT"
        )
