"""The ASGI application of the HTTP port."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_grpc.server.admin import AdminService
from omni_grpc.server.calls import PACKAGE
from omni_grpc.server.server import Backend
from omni_grpc.web.connection import Connection
from omni_grpc.web.files import Files
from omni_grpc.web.health import probe_routes
from omni_grpc.web.metrics import metrics_routes
from omni_grpc.web.openai.routes import openai_routes
from omni_grpc.web.origins import Origins, with_cors
from omni_grpc.web.page import page_routes
from omni_grpc.web.rpc import Rpcs


class App:
    """Rpcs by their paths, everything else by routes."""

    def __init__(self, backend: Backend) -> None:
        self._connection: ContextVar[Connection] = ContextVar("connection")
        self._calls = backend.calls
        config = backend.config
        apart = (AdminService,) if config.server.admin_address else ()
        self._rpcs = Rpcs(backend, self._connection, apart)
        files = Files(backend.gate, backend.calls)
        probes = probe_routes(backend.gate, identified=config.identity.on)
        openai, metrics = openai_routes(backend, files), metrics_routes(backend)
        self._routes = Starlette(routes=[*files.routes(), *openai, *probes, *metrics, *page_routes()])
        self.asgi: ASGIApp = Origins(
            with_cors(self._serve, config.http.http_origins), config.http.http_origins, _hosts(backend)
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-content-type-options", "nosniff")
                # proxies that hold answers back would turn streams into lumps
                headers.setdefault("x-accel-buffering", "no")
                if self._calls.leaving:
                    headers["connection"] = "close"
            await send(message)

        if scope["path"].startswith(PACKAGE):
            self._connection.set(Connection.of(scope))
            await self._rpcs(scope, receive, sending)
        else:
            await self._routes(scope, receive, sending)


def _hosts(backend: Backend) -> Collection[str] | None:
    """Names under which the port is reached; None where callers have to say who they are."""
    config = backend.config
    if config.identity.on:
        return None
    named = [config.http.host(config.server.host)]
    if config.http.http_url is not None:
        named.append(urlsplit(config.http.http_url).hostname or "")
    return named
