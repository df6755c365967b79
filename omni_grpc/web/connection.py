"""What a request says of who makes it, as ASGI has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_grpc.server.calls import Calls
from omni_grpc.types.address import joined
from omni_grpc.types.caller import Caller
from omni_grpc.types.trace import TRACEPARENT, TRACESTATE, TraceContext, read_trace

CERTIFICATE = "omni_grpc.certificate"
"""Of an ASGI scope's extensions: the client's certificate in PEM, verified by TLS."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """Who is at the other end."""

    authorization: tuple[str, ...]
    certificate: str | None
    peer: str
    trace: TraceContext | None = None
    """The span that the request comes from."""
    protocol: str = "connectrpc"
    """What an rpc is framed in, by the names of OpenTelemetry."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Connection:
        """That of an HTTP request."""
        content = "".join(_values(scope, b"content-type"))
        return cls(
            tuple(_values(scope, b"authorization")),
            (scope.get("extensions") or {}).get(CERTIFICATE),
            _peer(scope.get("client")),
            read_trace(_values(scope, TRACEPARENT.encode()), _values(scope, TRACESTATE.encode())),
            "grpc" if content.startswith("application/grpc") else "connectrpc",
        )

    async def caller(self, calls: Calls, method: str) -> Caller:
        """Raises Unauthenticated."""
        return await calls.caller(
            method, authorization=list(self.authorization), certificate=self.certificate, peer=self.peer
        )


def _values(scope: Mapping[str, Any], header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


def _peer(client: tuple[str, int] | None) -> str:
    """As gRPC writes it."""
    if client is None:
        return "unknown"
    host, port = client
    return f"{'ipv6' if ':' in host else 'ipv4'}:{joined(host, port)}"
