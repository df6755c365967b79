"""The server: the services of one gate over gRPC, on one address or two, and over whatever stack is beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from omni_grpc.config import EngineConfig
from omni_grpc.gate import Gate
from omni_grpc.server.admin import AdminService
from omni_grpc.server.artifacts import ArtifactService
from omni_grpc.server.calls import Calls
from omni_grpc.server.endpoint import Endpoint, Service
from omni_grpc.server.generation import GenerationService
from omni_grpc.server.health import Health
from omni_grpc.server.jobs import JobService
from omni_grpc.server.messages import Messages
from omni_grpc.server.metrics_port import MetricsPort
from omni_grpc.server.models import ModelService
from omni_grpc.server.watch import JobWatch
from omni_grpc.telemetry.metrics import Metrics, metrics_of
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What every stack serves: the same servicers, by their type, behind the same gate."""

    gate: Gate
    config: EngineConfig
    calls: Calls
    servicers: Mapping[type, object]
    messages: Messages
    metrics: Metrics | None = None


class Running(Protocol):
    """What takes calls between its start and its stop."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Takes no more calls, and returns when the open ones have ended, or their time is up."""


class Stack(Running, Protocol):
    """Another way to the same gate, on an address of its own."""

    def bind(self) -> None:
        """Takes the address. Raises ConfigError (CANNOT_LISTEN, BAD_CERTIFICATE)."""


class Server:
    """Serves a gate over gRPC, and over the stacks beside it. It belongs to the event loop on which it was made, and so
    does the gate.
    """

    def __init__(self, gate: Gate, config: EngineConfig, *, beside: Sequence[Callable[[Backend], Stack]] = ()) -> None:
        self._gate = gate
        self._calls = Calls(gate, served_methods(), unserved_methods())
        self._health = Health(gate, [descriptor.full_name for descriptor, _, _ in SERVICES])
        self._closing: asyncio.Future[None] | None = None
        messages = Messages(gate)
        servicers = self._servicers(messages)
        self._metrics = self._measured(gate, config)
        backend = Backend(
            gate=gate,
            config=config,
            calls=self._calls,
            servicers=servicers,
            messages=messages,
            metrics=self._metrics,
        )
        self._beside = [stack(backend) for stack in beside]
        self._metrics_port: MetricsPort | None = None
        if self._metrics is not None and config.metrics.metrics_port is not None:
            self._metrics_port = MetricsPort(self._metrics, config)
            self._beside.append(self._metrics_port)

        def endpoint(host: str, port: int, services: Sequence[Service]) -> Endpoint:
            return Endpoint(host, port, services, servicers, config=config, calls=self._calls, health_of=self._health)

        apart = [service for service in SERVICES if service[2] is AdminService] if config.server.admin_address else []
        self._main = endpoint(
            config.server.host, config.server.port, [service for service in SERVICES if service not in apart]
        )
        self._admin = endpoint(*config.server.admin, apart) if apart else None

    @property
    def port(self) -> int:
        """The port that it listens on; the real one once `start` has bound it, 0 for a Unix socket."""
        return self._main.port

    @property
    def address(self) -> str:
        """An address at which a client on this machine reaches it."""
        return self._main.address

    @property
    def admin_address(self) -> str | None:
        """The same of the admin service, where it has an address of its own."""
        return None if self._admin is None else self._admin.address

    @property
    def metrics_address(self) -> str | None:
        """The address of the port of the metrics, where there is one."""
        return None if self._metrics_port is None else self._metrics_port.address

    async def start(self) -> int:
        """Listens, then starts the engine, and returns the port (0 for a Unix socket) when jobs are taken.

        While the model is fetched and loads, health is NOT_SERVING, jobs are refused with UNAVAILABLE, and LoadModel
        reports progress. Raises ConfigError if an address cannot be bound (CANNOT_LISTEN) or a file of TLS cannot be
        used (BAD_CERTIFICATE), or the error that kept the engine from starting; nothing is left running then.
        """
        self._main.bind("host")
        if self._admin is not None:
            self._admin.bind("admin_address")
        for beside in self._beside:
            beside.bind()
        await self._gate.prepare()
        await self._health.start()
        if self._metrics is not None:
            await self._metrics.start()
        for stack in self._stacks:
            await stack.start()
        logger.info("listening on %s, loading %s", self.address, ", ".join(self._gate.serving))
        if self._admin is not None:
            logger.info("the admin service listens on %s", self._admin.address)
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
        await asyncio.gather(*(stack.stop() for stack in self._stacks))
        if self._metrics is not None:
            await self._metrics.stop()
        await self._gate.close()

    @property
    def _endpoints(self) -> Sequence[Endpoint]:
        return [self._main] if self._admin is None else [self._main, self._admin]

    @property
    def _stacks(self) -> Sequence[Running]:
        return [*self._endpoints, *self._beside]

    def _measured(self, gate: Gate, config: EngineConfig) -> Metrics | None:
        """None where nobody could read it."""
        readable = config.http.on or config.metrics.metrics_port is not None
        return metrics_of(gate, self._calls, config.metrics, readable=readable)

    def _servicers(self, messages: Messages) -> Mapping[type, object]:
        self._gate.render = messages.as_json
        watch = JobWatch(self._gate, messages)
        return {
            GenerationService: GenerationService(self._gate, watch),
            JobService: JobService(self._gate, messages, watch),
            ArtifactService: ArtifactService(self._gate, messages),
            ModelService: ModelService(self._gate),
            AdminService: AdminService(self._gate, self._calls),
        }


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
