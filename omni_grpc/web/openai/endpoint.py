"""An endpoint: a call like any other, with OpenAI's errors and an id of the request."""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from omni_grpc.server.calls import PACKAGE, Calls
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import NotFound
from omni_grpc.web.handled import Handle, Handled
from omni_grpc.web.openai.errors import answer

ROOT = "/v1/"
STACK = "openai"


class Endpoints:
    """Makes the routes below /v1."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def route(self, method: str, path: str, rpc: str, handle: Handle) -> Route:
        """`rpc`: the "Service/Method" that it comes nearest to, for the audit log."""
        return Route(
            ROOT + path,
            Endpoint(Handled(self._calls, PACKAGE + rpc, handle, refuse=answer, stack=STACK)),
            methods=[method],
        )

    def others(self) -> Route:
        """Whatever is not there."""
        handled = Handled(self._calls, "", _unknown, refuse=answer, stack=STACK)
        return Route(ROOT + "{path:path}", Endpoint(handled), methods=["GET", "POST", "PUT", "PATCH", "DELETE"])


class Endpoint:
    """Gives each request an id, which its log line, its job and its answer have (`x-request-id`)."""

    def __init__(self, handled: Handled) -> None:
        self._handled = handled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._handled(scope, receive, sending)


async def _unknown(request: Request, caller: Caller) -> Response:
    raise NotFound(
        f"there is no {request.method} {request.url.path} here; docs/openai.md lists what there is, and "
        "/omni_grpc.v1.SERVICE/METHOD has the whole API",
        reason="UNKNOWN_URL",
    )
