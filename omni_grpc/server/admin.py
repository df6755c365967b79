"""AdminService: what this server runs, its load, and the progress of loading its model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from omni_grpc import config as settings
from omni_grpc import wire
from omni_grpc.engine import Engine, EngineState
from omni_grpc.server.catalog import Catalog
from omni_grpc.server.changes import Changes
from omni_grpc.server.fields import Reader, refused
from omni_grpc.server.guard import PACKAGE, Guard
from omni_grpc.server.served import LOAD_MODEL, refuse_unserved
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.events import StepProgress
from omni_grpc.types.version import __version__
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc

WINDOW = 10.0
"""Seconds over which steps per second are counted."""
DEFAULT_INTERVAL = 1.0
MIN_INTERVAL = 0.1
LOAD_INTERVAL = 0.2
"""Shortest time in seconds between two messages about loading. The last message is not delayed."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, engine: Engine, catalog: Catalog, changes: Changes, guard: Guard) -> None:
        self._engine = engine
        self._catalog = catalog
        self._changes = changes
        self._guard = guard
        self._start_time = time.time()

    async def LoadModel(
        self, request: admin_pb2.LoadModelRequest, context: Any
    ) -> AsyncGenerator[admin_pb2.LoadModelResponse]:
        refuse_unserved(request, LOAD_MODEL)
        self._catalog.check_name(request.model)
        engine, heartbeat = self._engine, self._engine.config.server.heartbeat_interval

        def over() -> bool:
            return engine.state not in (EngineState.STARTING, EngineState.RESTARTING)

        while not over():
            told, until = engine.loading, time.monotonic() + heartbeat
            yield wire.to_message(told, admin_pb2.LoadModelResponse)
            await self._pause(LOAD_INTERVAL, over)
            while not over() and engine.loading is told and time.monotonic() < until:
                await self._pause(LOAD_INTERVAL, over)
        if engine.start_failure is not None:
            raise engine.start_failure.error()
        if engine.state is not EngineState.READY:
            raise Unavailable(f"the server is stopping: it is {engine.state}", reason="SERVER_STOPPED")
        yield admin_pb2.LoadModelResponse(phase=admin_pb2.LOAD_PHASE_READY, model=self._catalog.model())

    async def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, context: Any
    ) -> admin_pb2.GetServerInfoResponse:
        config = self._engine.config
        return wire.build(
            admin_pb2.GetServerInfoResponse,
            version=__version__,
            gpus=self._gpus(),
            max_queue=config.scheduler.max_queue,
            max_message_bytes=config.server.max_message_bytes,
            features=self._features(),
            start_time=self._start_time,
            instance_id=self._engine.forgotten.instance_id,
            unserved_rpcs=sorted(method.removeprefix(PACKAGE) for method in self._guard.unserved),
        )

    async def GetServerStats(
        self, request: admin_pb2.GetServerStatsRequest, context: Any
    ) -> admin_pb2.GetServerStatsResponse:
        return admin_pb2.GetServerStatsResponse(stats=self._stats())

    async def WatchServerStats(
        self, request: admin_pb2.WatchServerStatsRequest, context: Any
    ) -> AsyncGenerator[admin_pb2.WatchServerStatsResponse]:
        reader = Reader()
        asked = reader.seconds("interval", request)
        reader.check()
        interval = DEFAULT_INTERVAL if asked is None else asked
        if interval < MIN_INTERVAL:
            raise refused("interval", f"{interval:g} s is too short; nearest valid value: {MIN_INTERVAL:g} s")
        while self._engine.state is not EngineState.STOPPED:
            yield admin_pb2.WatchServerStatsResponse(stats=self._stats())
            await self._pause(interval, lambda: self._engine.state is EngineState.STOPPED)
        raise Unavailable("the server was stopped; watch again", reason="SERVER_STOPPED")

    async def _pause(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Sleeps for `seconds`, or until a change of the engine's state makes `enough` true."""
        until = time.monotonic() + seconds
        while not enough() and (left := until - time.monotonic()) > 0:
            await self._changes.wait(self._changes.count, left)

    def _gpus(self) -> list[admin_pb2.GpuInfo]:
        ready = self._engine.ready
        return [] if ready is None or ready.device == "cpu" else [admin_pb2.GpuInfo(name=ready.device, index=0)]

    def _features(self) -> dict[str, str]:
        """Every setting of the server except paths on its machine, and what the worker chose for "auto"."""
        features = {
            option.name: str(option.of(self._engine.config))
            for option in settings.options()
            if option.name not in ("model", "lora")
        }
        features = {name: value for name, value in features.items() if value != "None"}
        if (ready := self._engine.ready) is not None:
            features |= {"device": ready.device, "dtype": ready.dtype}
        return features

    def _stats(self) -> admin_pb2.ServerStats:
        stats = self._engine.stats()
        return wire.build(
            admin_pb2.ServerStats,
            queued=stats.queued,
            running=stats.running,
            max_queue=stats.max_queue,
            steps_per_second=self._recent_steps(time.time() - WINDOW) / WINDOW,
            open_streams=self._guard.open_streams,
            draining=self._engine.state in (EngineState.DRAINING, EngineState.STOPPED),
            gpus=self._gpus(),
            queued_by_model={self._engine.checkpoint.name: stats.queued},
            artifact_bytes=stats.artifact_bytes,
            time=time.time(),
            worker_restarts=stats.worker_restarts,
            step_cost=admin_pb2.StepCost(
                fixed_ms=stats.cost.fixed,
                token_ms=stats.cost.token,
                pair_ms=stats.cost.pair,
                error=stats.cost_error,
            ),
        )

    def _recent_steps(self, since: float) -> int:
        count = 0
        for job in self._engine.jobs.newest():
            for entry in reversed(job.entries):
                if entry.time < since:
                    break
                count += isinstance(entry.event, StepProgress)
        return count
