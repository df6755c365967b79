"""The port itself: uvicorn on the loop of everything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from omni_grpc.server.endpoint import LAST_WORDS_SECONDS
from omni_grpc.server.https import server_context
from omni_grpc.server.listen import bind_socket
from omni_grpc.server.server import Backend
from omni_grpc.types.address import dialed
from omni_grpc.web.app import App
from omni_grpc.web.connection import CERTIFICATE

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 65
"""Of an idle connection: longer than the 60 s after which proxies let go of theirs, so that they do it first."""


class HttpPort:
    """Serves a backend over HTTP/1.1. A stack of `Server`."""

    name = "http_host"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        config = backend.config
        assert config.http.http_port is not None
        self.host, self.port = config.http.host(config.server.host), config.http.http_port
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        settings = uvicorn.Config(
            App(backend).asgi,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(LAST_WORDS_SECONDS),
        )
        settings.load()
        self._context = server_context(config.tls)
        settings.ssl = self._context
        self._uvicorn = _Uvicorn(settings)

    @property
    def address(self) -> str:
        """Where a client on this machine reaches it."""
        return f"{'http' if self._context is None else 'https'}://{dialed(self.host, self.port)}"

    def bind(self, *, port: int | None = None, beside: bool = False) -> None:
        """Takes the address. Raises ConfigError (CANNOT_LISTEN)."""
        self.port = self.port if port is None else port
        field = "host" if self._backend.config.http.http_host is None else "http_host"
        shared = self._backend.config.server.handover is not None
        self._socket = bind_socket(
            self.host, self.port, host_field=field, port_field="http_port", shared=shared, beside=beside
        )
        self.port = self._socket.getsockname()[1]
        addresses = self._backend.gate.addresses
        addresses.base = addresses.base or self.address

    async def start(self) -> None:
        assert self._socket is not None, "bind comes first"
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        while not (self._uvicorn.started or self._serving.done()):  # noqa: ASYNC110 (uvicorn tells nobody)
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self._serving
        logger.info("HTTP listens on %s", self.address)

    async def stop(self) -> None:
        """Takes no more calls, and returns when the open ones have ended, or their time is up."""
        if self._serving is None:
            if self._socket is not None:
                self._socket.close()
            return
        self._uvicorn.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    """Signals are the command line's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """Passes on the certificate of the client."""

    _certificate: str | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        layer = transport.get_extra_info("ssl_object")
        if layer is not None and (presented := layer.getpeercert(binary_form=True)):
            self._certificate = ssl.DER_cert_to_PEM_cert(presented)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._certificate is not None:
            self.scope["extensions"] = {CERTIFICATE: self._certificate}  # type: ignore[dict-item]
