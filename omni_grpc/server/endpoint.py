"""One address on which services are served, with health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_grpc.config import EngineConfig
from omni_grpc.server.calls import Calls
from omni_grpc.server.guard import Guard
from omni_grpc.server.health import Health
from omni_grpc.server.incoming import GRPC_LIMIT
from omni_grpc.server.listen import bind
from omni_grpc.server.tls import server_credentials
from omni_grpc.types.address import dialed

LAST_WORDS_SECONDS = 5.0
"""Seconds that open calls get to send their last messages once the engine has stopped."""
FLUSH_SECONDS = 0.25
"""Seconds that what was said last gets to leave: health checks and reflection hold their streams open beyond that."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # clients may ping an idle connection every 10 s; the default answers the third such ping with GOAWAY
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # long-lived clients come back now and then, so that new replicas get their share
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 2 * 3_600_000),
    # two servers on one port would share its calls in silence
    ("grpc.so_reuseport", 0),
)

Service = tuple[ServiceDescriptor, Callable[[Any, Any], None], type]
"""A service of the API, the function that adds its servicer to a server, and the type of that servicer."""


class Endpoint:
    """A gRPC server on an address of its own. Several endpoints may share their `calls`."""

    def __init__(
        self,
        host: str,
        port: int,
        services: Sequence[Service],
        servicers: Mapping[type, object],
        *,
        config: EngineConfig,
        calls: Calls,
        health_of: Health,
    ) -> None:
        self.host, self.port = host, port
        self._config = config
        self._calls = calls
        guard = Guard(calls, config.server.max_message_bytes)
        # each once: of two values for an option, gRPC takes the first
        options = dict(OPTIONS) | _for_handover(config)
        options["grpc.max_receive_message_length"] = GRPC_LIMIT * config.server.max_message_bytes
        self._grpc = aio.server(interceptors=(guard,), options=tuple(options.items()))
        for _, register, kind in services:
            register(servicers[kind], self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(health_of.servicer, self._grpc)
        names = [descriptor.full_name for descriptor, _, _ in services]
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)

    @property
    def address(self) -> str:
        """An address at which a client on this machine reaches it."""
        return dialed(self.host, self.port)

    def bind(self, field: str, *, beside: bool = False) -> None:
        """Takes the address, and the real port. Raises ConfigError (CANNOT_LISTEN, BAD_CERTIFICATE); `field` is the
        setting that names the address; `beside`: another server listens there, and has agreed.
        """
        credentials = server_credentials(self._config.tls)
        self.port = bind(self._grpc, self.host, self.port, credentials, field=field, beside=beside)

    async def start(self) -> None:
        await self._grpc.start()

    async def stop(self) -> None:
        """Takes no more calls, and returns when the open ones have ended, or their time is up."""
        # the port closes at once; calls that are open get the time to finish
        closing = asyncio.create_task(self._grpc.stop(LAST_WORDS_SECONDS))
        await self._calls.idle(LAST_WORDS_SECONDS)
        # handlers have ended; what they said last, and how, may still be on its way out
        await asyncio.wait({closing}, timeout=FLUSH_SECONDS)
        await self._grpc.stop(None)
        await closing


def _for_handover(config: EngineConfig) -> dict[str, int]:
    """Of a server that is to be followed by another one, which listens on the same port then. Only a connection that is
    at its age is closed without a call that is lost: a server that stops cancels those that arrive.
    """
    if config.server.handover is None:
        return {}
    age = round(1000 * config.server.handover_seconds)
    return {"grpc.so_reuseport": 1, "grpc.max_connection_age_ms": age}
