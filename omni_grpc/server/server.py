"""The server: the services of one gate over gRPC, on one address or two, and over whatever stack is beside it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from omni_grpc.config import EngineConfig
from omni_grpc.gate import Gate
from omni_grpc.server.admin import AdminService
from omni_grpc.server.artifacts import ArtifactService
from omni_grpc.server.calls import Calls
from omni_grpc.server.endpoint import Endpoint, Service
from omni_grpc.server.generation import GenerationService
from omni_grpc.server.handover import Address, Offering, Predecessor
from omni_grpc.server.health import Health
from omni_grpc.server.jobs import JobService
from omni_grpc.server.messages import Messages
from omni_grpc.server.metrics_port import MetricsPort
from omni_grpc.server.models import ModelService
from omni_grpc.server.steering import connections
from omni_grpc.server.watch import JobWatch
from omni_grpc.telemetry.job_log import log_end
from omni_grpc.telemetry.metrics import Metrics, metrics_of
from omni_grpc.telemetry.tracing import Tracing
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

ONE_PROCESS = "sqlite"
"""The store that one process at a time can have."""
MOVED = 1.2
"""Times the age at which a connection is moved: gRPC varies it by a tenth."""
SETTLED = 2.0
"""Seconds for a client to hear of it, and to make its last calls there."""
LOOK = 0.1
"""Seconds between two looks for connections."""

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
    """Another way to the same gate, on an address of its own. `name`: the setting of its host."""

    name: str
    host: str
    port: int

    def bind(self, *, port: int | None = None, beside: bool = False) -> None:
        """Takes the address. `port`: instead of its own; `beside`: another server listens there, and has agreed. Raises
        ConfigError (CANNOT_LISTEN, BAD_CERTIFICATE).
        """


class Server:
    """Serves a gate over gRPC, and over the stacks beside it. It belongs to the event loop on which it was made, and so
    does the gate.
    """

    def __init__(self, gate: Gate, config: EngineConfig, *, beside: Sequence[Callable[[Backend], Stack]] = ()) -> None:
        self._gate = gate
        self._tracing = Tracing.of(config.traces, os.environ, instance=gate.instance_id)
        gate.on_end.append(self._tracing.job_ended)
        gate.on_end.append(log_end)
        gate.on_attempt.append(self._tracing.webhook)
        self._calls = Calls(gate, served_methods(), unserved_methods(), self._tracing)
        self._health = Health(gate, [descriptor.full_name for descriptor, _, _ in SERVICES])
        self._closing: asyncio.Future[None] | None = None
        self._config = config
        path = config.server.handover
        self._offering = (
            None if path is None else Offering(Path(path), lambda: self._wanted, gate.fleet.storage.store.kind)
        )
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
        before = None if self._offering is None else await self._offering.predecessor(self._wanted)
        if before is None:
            self._bind(None)
            await self._gate.prepare()
            await self._listen()
            async with self._stopped_on_error():
                await self._gate.start()
        elif self._loads_beside(before):
            # what keeps the models from loading leaves the other server as it is
            async with self._stopped_on_error(), before:
                await self._gate.prepare()
                await self._gate.start()
                self._bind(before)
                await self._listen()
                await before.leave()
        else:
            async with self._stopped_on_error(), before:
                with self._calls.held():
                    self._bind(before)
                    await self._listen()
                    await before.leave()
                    logger.info("process %d ends what it has; calls wait here meanwhile", before.pid)
                    await before.gone()
                    await self._gate.prepare()
                    await self._gate.start()
        if self._offering is not None:
            await self._offering.start()
        return self.port

    def _bind(self, before: Predecessor | None) -> None:
        def shared(name: str) -> bool:
            return before is not None and before.has(name)

        if before is not None:
            self._main.port = before.port("host", self._main.port)
        self._main.bind("host", beside=shared("host"))
        if self._admin is not None:
            if before is not None:
                self._admin.port = before.port("admin_address", self._admin.port)
            self._admin.bind("admin_address", beside=shared("admin_address"))
        for stack in self._beside:
            port = None if before is None else before.port(stack.name, stack.port)
            stack.bind(port=port, beside=shared(stack.name))

    async def _listen(self) -> None:
        await self._health.start()
        if self._metrics is not None:
            await self._metrics.start()
        for stack in self._stacks:
            await stack.start()
        logger.info("listening on %s, loading %s", self.address, ", ".join(self._gate.serving))
        if self._admin is not None:
            logger.info("the admin service listens on %s", self._admin.address)

    @contextlib.asynccontextmanager
    async def _stopped_on_error(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self.stop()
            raise

    # --- one server after the other -----------------------------------------------------------------------------------

    @property
    def _wanted(self) -> Mapping[str, Address]:
        """Where it listens, by the setting that names the address."""
        found = {"host": (self._main.host, self._main.port)}
        if self._admin is not None:
            found["admin_address"] = (self._admin.host, self._admin.port)
        for stack in self._beside:
            found[stack.name] = (stack.host, stack.port)
        return found

    def _loads_beside(self, before: Predecessor) -> bool:
        how = self._config.server.handover_load
        return how == "beside" or (how == "auto" and before.rows != ONE_PROCESS)

    async def succeeded(self) -> None:
        """Returns when another server has taken over; never where none can."""
        if self._offering is None:
            await asyncio.get_running_loop().create_future()
            return
        await self._offering.left.wait()

    async def retire(self) -> None:
        """Serves those who are connected until their connections have gone to the server that has taken over."""
        self._calls.leaving = True
        ports = {port for _, port in self._wanted.values()}
        until = time.monotonic() + MOVED * self._config.server.handover_seconds + SETTLED
        while connections(ports) and time.monotonic() < until:  # noqa: ASYNC110 (the kernel tells nobody)
            await asyncio.sleep(LOOK)

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
        # streams can end once their last events may be seen
        await self._gate.written()
        await asyncio.gather(*(stack.stop() for stack in self._stacks))
        if self._metrics is not None:
            await self._metrics.stop()
        await self._gate.close()
        await asyncio.to_thread(self._tracing.close)
        if self._offering is not None:
            await self._offering.stop()

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
