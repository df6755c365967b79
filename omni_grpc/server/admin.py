"""AdminService: what this server runs, its load, and the progress of loading its model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from omni_grpc import wire
from omni_grpc.gate import Gate, LoadView
from omni_grpc.server.catalog import model_message
from omni_grpc.server.fields import Reader
from omni_grpc.server.guard import PACKAGE, Guard
from omni_grpc.server.served import LOAD_MODEL, refuse_unserved
from omni_grpc.types.caller import Caller
from omni_grpc.types.version import __version__
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, gate: Gate, guard: Guard) -> None:
        self._gate = gate
        self._guard = guard

    async def LoadModel(
        self, request: admin_pb2.LoadModelRequest, caller: Caller
    ) -> AsyncGenerator[admin_pb2.LoadModelResponse]:
        refuse_unserved(request, LOAD_MODEL)
        async for told in self._gate.operation.load_model(caller, request.model):
            yield wire.to_message(told, admin_pb2.LoadModelResponse)
        model = model_message(self._gate.models.get(caller, request.model))
        yield admin_pb2.LoadModelResponse(phase=admin_pb2.LOAD_PHASE_READY, model=model)

    async def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, caller: Caller
    ) -> admin_pb2.GetServerInfoResponse:
        view = self._gate.operation.info(caller)
        return wire.build(
            admin_pb2.GetServerInfoResponse,
            version=__version__,
            gpus=_gpus(view.device),
            max_queue=view.config.scheduler.max_queue,
            max_message_bytes=view.config.server.max_message_bytes,
            features=view.features,
            start_time=view.start_time,
            instance_id=view.instance_id,
            replica=view.replica,
            storage=view.storage,
            unserved_rpcs=sorted(method.removeprefix(PACKAGE) for method in self._guard.unserved),
        )

    async def GetServerStats(
        self, request: admin_pb2.GetServerStatsRequest, caller: Caller
    ) -> admin_pb2.GetServerStatsResponse:
        return admin_pb2.GetServerStatsResponse(stats=self._stats(self._gate.operation.load(caller)))

    async def WatchServerStats(
        self, request: admin_pb2.WatchServerStatsRequest, caller: Caller
    ) -> AsyncGenerator[admin_pb2.WatchServerStatsResponse]:
        reader = Reader()
        interval = reader.seconds("interval", request)
        reader.check()
        async for load in self._gate.operation.watch_load(caller, interval):
            yield admin_pb2.WatchServerStatsResponse(stats=self._stats(load))

    def _stats(self, load: LoadView) -> admin_pb2.ServerStats:
        cost = load.engine.cost
        return wire.build(
            admin_pb2.ServerStats,
            queued=load.queued,
            running=load.running,
            max_queue=load.engine.max_queue,
            steps_per_second=load.steps_per_second,
            open_streams=self._guard.open_streams,
            draining=load.draining,
            gpus=_gpus(load.device),
            queued_by_model={load.model: load.queued},
            artifact_bytes=load.artifact_bytes,
            time=time.time(),
            worker_restarts=load.engine.worker_restarts,
            step_cost=admin_pb2.StepCost(
                fixed_ms=cost.fixed, token_ms=cost.token, pair_ms=cost.pair, error=load.engine.cost_error
            ),
        )


def _gpus(device: str | None) -> list[admin_pb2.GpuInfo]:
    return [] if device is None else [admin_pb2.GpuInfo(name=device, index=0)]
