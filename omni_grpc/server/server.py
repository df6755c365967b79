"""The gRPC server: the services of one gate, health and reflection, on one port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_grpc.config import ServerConfig
from omni_grpc.gate import Gate
from omni_grpc.server.admin import AdminService
from omni_grpc.server.artifacts import ArtifactService
from omni_grpc.server.generation import GenerationService
from omni_grpc.server.guard import Guard
from omni_grpc.server.health import Health
from omni_grpc.server.incoming import GRPC_LIMIT
from omni_grpc.server.jobs import JobService
from omni_grpc.server.listen import cannot_listen, check_free
from omni_grpc.server.messages import Messages
from omni_grpc.server.models import ModelService
from omni_grpc.server.watch import JobWatch
from omni_grpc.types.address import dialed, joined
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
    """Serves a gate over gRPC. It belongs to the event loop on which it was made, and so does the gate."""

    def __init__(self, gate: Gate, config: ServerConfig) -> None:
        self.port = config.port
        """The port that it listens on; the real one once `start` has bound it."""
        self._gate = gate
        self._config = config
        self._guard = Guard(served_methods(), unserved_methods(), config.max_message_bytes)
        names = [descriptor.full_name for descriptor, _, _ in SERVICES]
        self._health = Health(gate, names)
        self._closing: asyncio.Future[None] | None = None
        options = (*OPTIONS, ("grpc.max_receive_message_length", GRPC_LIMIT * config.max_message_bytes))
        self._grpc = aio.server(interceptors=(self._guard,), options=options)
        servicers = self._servicers()
        for _, register, kind in SERVICES:
            register(servicers[kind], self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)

    @property
    def address(self) -> str:
        """An address at which a client on this machine reaches it."""
        return dialed(self._config.host, self.port)

    async def start(self) -> int:
        """Listens, then starts the engine, and returns the port when jobs are taken.

        While the model is fetched and loads, health is NOT_SERVING, jobs are refused with UNAVAILABLE, and LoadModel
        reports progress. Raises ConfigError (CANNOT_LISTEN) if the address cannot be bound, or the error that kept the
        engine from starting; nothing is left running then.
        """
        self.port = self._bind()
        await self._health.start()
        await self._grpc.start()
        logger.info("listening on %s, loading %s", self.address, self._gate.model)
        try:
            await self._gate.start()
        except BaseException:
            await self.stop()
            raise
        return self.port

    async def stop(self, drain: float = 0.0) -> None:
        """Refuses new jobs, gives existing ones `drain` seconds to finish, fails the rest, and closes the port.

        Streams get the last events of their jobs. Calling it again restarts the timeout, so that a second call can cut
        the first one short; both return at the end.
        """
        await self._gate.drain(drain)
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
        self._gate.close()

    def _servicers(self) -> Mapping[type, object]:
        messages = Messages(self._gate)
        watch = JobWatch(self._gate, messages)
        return {
            GenerationService: GenerationService(self._gate, watch),
            JobService: JobService(self._gate, messages, watch),
            ArtifactService: ArtifactService(self._gate, messages),
            ModelService: ModelService(self._gate),
            AdminService: AdminService(self._gate, self._guard),
        }

    def _bind(self) -> int:
        host, port = self._config.host, self._config.port
        check_free(host, port)
        try:
            return int(self._grpc.add_insecure_port(joined(host, port)))
        except RuntimeError as error:
            why = "the operating system refused the address; choose another --host or --port"
            raise cannot_listen(host, port, why) from error


def unserved_methods() -> frozenset[str]:
    """Methods of the API that no servicer has, as "/package.Service/Method"."""
    return frozenset(name for name, is_served in _methods() if not is_served)


def served_methods() -> frozenset[str]:
    """The others."""
    return frozenset(name for name, is_served in _methods() if is_served)


def _methods() -> Iterator[tuple[str, bool]]:
    for descriptor, _, kind in SERVICES:
        for method in descriptor.methods:
            yield f"/{descriptor.full_name}/{method.name}", method.name in vars(kind)
