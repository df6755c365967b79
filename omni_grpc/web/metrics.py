"""Metrics on the HTTP port, for those who may see the figures of every tenant."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omni_grpc.server.calls import PACKAGE
from omni_grpc.server.metrics_port import PATH
from omni_grpc.server.server import Backend
from omni_grpc.types.caller import Caller
from omni_grpc.web.handled import Handled

NEAREST = PACKAGE + "AdminService/GetServerStats"


def metrics_routes(backend: Backend) -> Iterator[Route]:
    """Nothing where nothing is measured, or where the admin service has an address of its own: they are part of it."""
    metrics, gate = backend.metrics, backend.gate
    if metrics is None or backend.config.server.admin_address is not None:
        return

    async def text(request: Request, caller: Caller) -> Response:
        gate.operation.may_measure(caller)
        body, headers = await metrics.text(
            request.headers.get("accept", ""), request.headers.get("accept-encoding", "")
        )
        return Response(body, headers=dict(headers))

    yield Route(PATH, Handled(backend.calls, NEAREST, text), methods=["GET", "HEAD"])
