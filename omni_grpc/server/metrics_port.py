"""The port of the metrics: one page for Prometheus, in the operator's network, whatever else is served."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket

from omni_grpc.config import EngineConfig
from omni_grpc.server.https import server_context
from omni_grpc.server.listen import bind_socket
from omni_grpc.telemetry.metrics import Metrics
from omni_grpc.types.address import dialed
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

PATH = "/metrics"
READ_SECONDS = 10.0
"""How long a client may take to say what it wants, and to take the answer."""
HEAD_BYTES = 16 << 10
"""The longest head of a request."""


class MetricsPort:
    """Answers GET /metrics over HTTP/1.1, one request for each connection. It asks nobody who they are, except for a
    certificate where the server's TLS does.
    """

    name = "metrics_host"

    def __init__(self, metrics: Metrics, config: EngineConfig) -> None:
        """Raises ConfigError, by field, for files of TLS that cannot be used."""
        assert config.metrics.metrics_port is not None
        self._metrics = metrics
        self.host, self.port = config.metrics.host, config.metrics.metrics_port
        self._shared = config.server.handover is not None
        self._context = server_context(config.tls)
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where a client on this machine reaches it."""
        return f"{'http' if self._context is None else 'https'}://{dialed(self.host, self.port)}"

    def bind(self, *, port: int | None = None, beside: bool = False) -> None:
        """Takes the address. Raises ConfigError (CANNOT_LISTEN)."""
        self.port = self.port if port is None else port
        self._socket = bind_socket(
            self.host,
            self.port,
            host_field="metrics_host",
            port_field="metrics_port",
            shared=self._shared,
            beside=beside,
        )
        self.port = self._socket.getsockname()[1]

    async def start(self) -> None:
        assert self._socket is not None, "bind comes first"
        self._server = await asyncio.start_server(self._serve, sock=self._socket, ssl=self._context, limit=HEAD_BYTES)
        logger.info("metrics are at %s%s", self.address, PATH)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("a request for metrics had no answer: %s", plain(error))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: str) -> bytes:
        first, *lines = head.split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, b"this port speaks HTTP/1.1\n")
        method, path = words[0], words[1].partition("?")[0]
        if path != PATH:
            return _response(404, b"there is /metrics here alone\n", method)
        if method not in ("GET", "HEAD"):
            return _response(405, b"metrics are read by GET\n", method, {"allow": "GET, HEAD"})
        try:
            text, told = await self._metrics.text(headers.get("accept", ""), headers.get("accept-encoding", ""))
        except Exception:
            logger.exception("the metrics could not be read")
            return _response(500, b"the metrics could not be read; the log says why\n", method)
        return _response(200, text, method, dict(told))


def _response(status: int, body: bytes, method: str = "GET", headers: dict[str, str] | None = None) -> bytes:
    fields = {"content-type": "text/plain; charset=utf-8", **(headers or {})}
    fields |= {"content-length": str(len(body)), "connection": "close", "x-content-type-options": "nosniff"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    start = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n{head}\r\n".encode("latin-1")
    return start if method == "HEAD" else start + body
