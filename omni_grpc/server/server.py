"""The gRPC server: one engine, its services, health and reflection, on one port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_grpc.config import ServerConfig
from omni_grpc.engine import Engine, EngineState
from omni_grpc.server.admin import AdminService
from omni_grpc.server.artifacts import ArtifactService
from omni_grpc.server.catalog import Catalog
from omni_grpc.server.changes import Changes
from omni_grpc.server.generation import GenerationService
from omni_grpc.server.guard import Guard
from omni_grpc.server.health import Health
from omni_grpc.server.intake import Intake
from omni_grpc.server.jobs import JobService
from omni_grpc.server.listen import bind, listen_address, port_of
from omni_grpc.server.messages import Messages
from omni_grpc.server.models import ModelService
from omni_grpc.server.tls import server_credentials
from omni_grpc.server.watch import JobWatch
from omni_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    artifact_pb2,
    artifact_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 5.0
"""Seconds that open calls get to send their last messages once the engine has stopped."""

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

SERVICES: tuple[Service, ...] = (
    (
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
        generation_pb2_grpc.add_GenerationServiceServicer_to_server,
        GenerationService,
    ),
    (
        job_pb2.DESCRIPTOR.services_by_name["JobService"],
        job_pb2_grpc.add_JobServiceServicer_to_server,
        JobService,
    ),
    (
        artifact_pb2.DESCRIPTOR.services_by_name["ArtifactService"],
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server,
        ArtifactService,
    ),
    (
        model_pb2.DESCRIPTOR.services_by_name["ModelService"],
        model_pb2_grpc.add_ModelServiceServicer_to_server,
        ModelService,
    ),
    (
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
        admin_pb2_grpc.add_AdminServiceServicer_to_server,
        AdminService,
    ),
)


class Server:
    """Serves an engine. It belongs to the event loop on which it was made, and so does the engine."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.port = config.port
        """The port that it listens on; the real one once `start` has bound it, 0 for a Unix socket."""
        self.address = listen_address(config.host, config.port)
        """The same as HOST:PORT or unix:PATH."""
        self._engine = engine
        self._config = config
        self._changes = Changes()
        self._intake = Intake(engine, self._changes)
        self._guard = Guard(unserved_methods())
        names = [descriptor.full_name for descriptor, _, _ in SERVICES]
        self._health = Health(engine, names)
        self._closing: asyncio.Future[None] | None = None
        options = (*OPTIONS, ("grpc.max_receive_message_length", config.max_message_bytes))
        self._grpc = aio.server(interceptors=(self._guard,), options=options)
        servicers = self._servicers()
        for _, register, kind in SERVICES:
            register(servicers[kind], self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)

    async def start(self) -> int:
        """Listens, then starts the engine, and returns the port (0 for a Unix socket) when jobs are taken.

        While the model is fetched and loads, health is NOT_SERVING, jobs are refused with UNAVAILABLE, and LoadModel
        reports progress. Raises ConfigError if the address cannot be bound (CANNOT_LISTEN) or a file of TLS cannot be
        used (BAD_CERTIFICATE), or the error that kept the engine from starting; nothing is left running then.
        """
        config = self._config
        self.address = bind(
            self._grpc,
            listen_address(config.host, config.port),
            server_credentials(self._engine.config.tls),
            change="--host or --port",
        )
        self.port = port_of(self.address)
        self._engine.on_state.append(self._on_state)
        await self._health.start()
        await self._grpc.start()
        logger.info("listening on %s, loading %s", self.address, self._engine.checkpoint.name)
        try:
            await self._engine.start()
        except BaseException:
            await self.stop()
            raise
        return self.port

    async def stop(self, drain: float = 0.0) -> None:
        """Refuses new jobs, gives existing ones `drain` seconds to finish, fails the rest, and closes the port.

        Streams get the last events of their jobs. Calling it again restarts the timeout, so that a second call can cut
        the first one short; both return at the end.
        """
        await self._engine.close(drain)
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._health.stop()
        # the port closes at once; calls that are open get the time to finish
        closing = asyncio.create_task(self._grpc.stop(LAST_WORDS_SECONDS))
        await self._guard.idle(LAST_WORDS_SECONDS)
        await self._grpc.stop(None)
        await closing
        self._intake.close()

    def _on_state(self, state: EngineState) -> None:
        self._changes.notify()

    def _servicers(self) -> Mapping[type, object]:
        messages, catalog = Messages(self._engine), Catalog(self._engine)
        watch = JobWatch(self._engine, messages)
        return {
            GenerationService: GenerationService(self._intake, watch),
            JobService: JobService(self._engine, self._intake, self._changes, messages, watch),
            ArtifactService: ArtifactService(self._engine, messages),
            ModelService: ModelService(self._engine, catalog),
            AdminService: AdminService(self._engine, catalog, self._changes, self._guard),
        }


def unserved_methods() -> frozenset[str]:
    """Methods of the API that no servicer has, as "/package.Service/Method"."""
    return frozenset(
        f"/{descriptor.full_name}/{method.name}"
        for descriptor, _, kind in SERVICES
        for method in descriptor.methods
        if method.name not in vars(kind)
    )
