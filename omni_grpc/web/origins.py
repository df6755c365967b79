"""Which pages may call: those of this port, and those of origins that the operator lists.

A browser sends a form, or a request without a body, to any address, and only keeps the answer from the page. So what
comes from a page of another origin is refused here, before anything is done. And a name that its owner points at
127.0.0.1 (DNS rebinding) makes any page one "of this port": so where everybody may do everything, only names and
addresses of this server are answered.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_grpc.config.http import ANY
from omni_grpc.types.address import ip

LOCAL = ("localhost",)
OPENAI_HEADERS = (
    "OpenAI-Beta",
    "OpenAI-Organization",
    "OpenAI-Project",
    "X-Stainless-Arch",
    "X-Stainless-Helper-Method",
    "X-Stainless-Lang",
    "X-Stainless-OS",
    "X-Stainless-Package-Version",
    "X-Stainless-Retry-Count",
    "X-Stainless-Runtime",
    "X-Stainless-Runtime-Version",
    "X-Stainless-Timeout",
)
"""What its client for browsers sends."""
ALLOWED_HEADERS = (
    "Accept",
    "Authorization",
    "Connect-Accept-Encoding",
    "Connect-Content-Encoding",
    "Connect-Protocol-Version",
    "Connect-Timeout-Ms",
    "Content-Type",
    "Grpc-Timeout",
    "Idempotency-Key",
    "If-None-Match",
    "If-Range",
    "Range",
    "Traceparent",
    "Tracestate",
    "X-Grpc-Web",
    "X-User-Agent",
    *OPENAI_HEADERS,
)
EXPOSED_HEADERS = (
    "Accept-Ranges",
    "Content-Length",
    "Content-Range",
    "ETag",
    "Grpc-Message",
    "Grpc-Status",
    "Grpc-Status-Details-Bin",
    "Retry-After",
    "Retry-After-Ms",
    "Traceparent",
    "X-Job-Id",
    "X-Request-Id",
    "X-Seed",
    "X-Should-Retry",
    "X-Warnings",
)


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Answers browsers that ask whether they may call."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=ALLOWED_HEADERS,
        expose_headers=EXPOSED_HEADERS,
        max_age=7200,
    )


class Origins:
    """Refuses what comes from a page of another origin, and hosts that are not this server's.

    `hosts`: names under which it is reached; None: any, since callers say who they are.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], hosts: Collection[str] | None) -> None:
        self._app = app
        self._origins = origins
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._refusal(dict(scope["headers"]))) is not None:
            await PlainTextResponse(why + "\n", 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> str | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and not self._is_ours(host):
            return (
                f"the host {host!r} is not this server's; name it by --http-url or --http-host, or have callers "
                "identify themselves (--token-file)"
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or ANY in self._origins or origin in self._origins or urlsplit(origin).netloc == host:
            return None
        return f"pages of {origin} may not call this server; the operator can list it in --http-origins"

    def _is_ours(self, host: str) -> bool:
        assert self._hosts is not None
        name = urlsplit(f"//{host}").hostname or ""
        return ip(name) is not None or name in LOCAL or name in self._hosts
