"""AdminService: what this server runs, its load, its models in and out of memory, and its end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping

from omni_grpc import wire
from omni_grpc.gate import EngineStats, Gate, LoadView, ModelLoad, ProfileAsk, ReplicaStats
from omni_grpc.server.adapters import lora_ask, lora_message
from omni_grpc.server.calls import PACKAGE, Calls
from omni_grpc.server.catalog import STATES, model_message
from omni_grpc.server.fields import Reader, given, members
from omni_grpc.server.served import LOAD_MODEL, refuse_unserved
from omni_grpc.types.caller import Caller
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import SleepLevel
from omni_grpc.types.version import __version__
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc

LEVELS: Mapping[int, SleepLevel] = {
    number: level for number, level in members(SleepLevel, admin_pb2.SleepLevel).items() if level is not None
}


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, gate: Gate, calls: Calls) -> None:
        self._gate = gate
        self._calls = calls

    async def LoadModel(
        self, request: admin_pb2.LoadModelRequest, caller: Caller
    ) -> AsyncGenerator[admin_pb2.LoadModelResponse]:
        refuse_unserved(request, LOAD_MODEL)
        reader = Reader()
        options = reader.struct("engine_options", request.engine_options)
        reader.check()
        async for told in self._gate.operation.load_model(caller, request.model, options):
            yield wire.to_message(told, admin_pb2.LoadModelResponse)
        model = model_message(self._gate.models.get(caller, request.model))
        yield admin_pb2.LoadModelResponse(phase=admin_pb2.LOAD_PHASE_READY, model=model)

    async def UnloadModel(self, request: admin_pb2.UnloadModelRequest, caller: Caller) -> admin_pb2.UnloadModelResponse:
        freed = await self._gate.operation.unload_model(caller, _named(request.model), force=request.force)
        return admin_pb2.UnloadModelResponse(freed_bytes=freed)

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, caller: Caller) -> admin_pb2.LoadLoraResponse:
        view = await self._gate.loras.load(caller, lora_ask(request))
        return admin_pb2.LoadLoraResponse(lora=lora_message(view))

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, caller: Caller) -> admin_pb2.UnloadLoraResponse:
        reader = Reader()
        wait = reader.seconds("wait", request)
        reader.check()
        failed = await self._gate.loras.unload(caller, request.model, request.lora_id, wait=wait, force=request.force)
        return admin_pb2.UnloadLoraResponse(failed_jobs=failed)

    async def Sleep(self, request: admin_pb2.SleepRequest, caller: Caller) -> admin_pb2.SleepResponse:
        reader = Reader()
        levels = {**LEVELS, admin_pb2.SLEEP_LEVEL_UNSPECIFIED: SleepLevel.KEEP_WEIGHTS}
        level = reader.choice("level", admin_pb2.SleepLevel, request.level, levels)
        reader.check()
        assert level is not None, "a level that is not known is refused"
        freed = await self._gate.operation.sleep(caller, _named(request.model), level)
        return admin_pb2.SleepResponse(freed_bytes=freed)

    async def Wake(self, request: admin_pb2.WakeRequest, caller: Caller) -> admin_pb2.WakeResponse:
        elapsed = await self._gate.operation.wake(caller, _named(request.model))
        return wire.build(admin_pb2.WakeResponse, elapsed=elapsed)

    async def Drain(self, request: admin_pb2.DrainRequest, caller: Caller) -> admin_pb2.DrainResponse:
        reader = Reader()
        timeout = reader.seconds("timeout", request)
        one = request.HasField("replica")
        if request.model and not one:
            reader.refuse("model", "needs `replica`; without it the whole server drains")
        reader.check()
        if one:
            running, queued = await self._gate.operation.renew(caller, request.model, request.replica, timeout)
        else:
            running, queued = await self._gate.operation.drain(caller, timeout)
        return admin_pb2.DrainResponse(running=running, queued=queued)

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
            loading=[_loading(name, told) for name, told in view.loading.items()],
            unserved_rpcs=sorted(method.removeprefix(PACKAGE) for method in self._calls.unserved),
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

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, caller: Caller
    ) -> admin_pb2.StartProfileResponse:
        reader = Reader()
        limit = reader.seconds("time_limit", request)
        reader.check()
        ask = ProfileAsk(
            model=request.model,
            job_id=request.job_id,
            start_step=request.start_step,
            num_steps=given(request, "num_steps"),
            activities=tuple(request.activities),
            with_stack=request.with_stack,
            record_shapes=request.record_shapes,
            memory=request.memory,
            replica=given(request, "replica"),
            all_ranks=request.all_ranks,
            time_limit=limit,
        )
        return wire.to_message(await self._gate.profiles.start(caller, ask), admin_pb2.StartProfileResponse)

    async def StopProfile(self, request: admin_pb2.StopProfileRequest, caller: Caller) -> admin_pb2.StopProfileResponse:
        found = await self._gate.profiles.stop(caller, request.profile_id, wait=request.wait)
        ids = [file.artifact_id for file in found.files]
        return wire.build(
            admin_pb2.StopProfileResponse, artifact_ids=ids, files=found.files, steps=found.steps, end=found.end
        )

    def _stats(self, load: LoadView) -> admin_pb2.ServerStats:
        engines = [one.engine for one in load.models if one.engine is not None]
        delays = [engine.queue_delay for engine in engines if engine.queue_delay is not None]
        return wire.build(
            admin_pb2.ServerStats,
            queued=load.queued,
            running=load.running,
            max_queue=sum(engine.max_queue for engine in engines),
            est_queue_delay=max(delays, default=None),
            steps_per_second=load.steps_per_second,
            open_streams=self._calls.open_streams,
            draining=load.draining,
            gpus=_gpus(load.device),
            queued_by_model={one.model: one.queued for one in load.models},
            artifact_bytes=load.artifact_bytes,
            time=time.time(),
            worker_restarts=sum(engine.worker_restarts for engine in engines),
            step_cost=_cost(engines[0]) if engines else None,
            models=[_model_stats(one, everything=load.everything) for one in load.models],
        )


def _named(model: str) -> str:
    """The name of a model that is required. Raises InvalidArgument."""
    if not model:
        reader = Reader()
        reader.refuse("model", "is required")
        reader.check()
    return model


def _model_stats(load: ModelLoad, *, everything: bool) -> admin_pb2.ModelStats:
    engine = load.engine
    return wire.build(
        admin_pb2.ModelStats,
        model=load.model,
        state=STATES[load.state],
        queued=load.queued,
        running=load.running,
        est_queue_delay=None if engine is None else engine.queue_delay,
        predicted_work=None if engine is None else engine.work,
        replicas=[_replica(one) for one in engine.replicas] if engine is not None and everything else [],
        step_cost=None if engine is None else _cost(engine),
        loading=_loading(load.model, load.loading),
    )


def _loading(model: str, told: Loading | None) -> admin_pb2.ModelLoading | None:
    """How far a model is that is being loaded."""
    if told is None:
        return None
    return wire.build(
        admin_pb2.ModelLoading,
        model=model,
        phase=told.phase,
        component=told.component,
        done_bytes=told.done_bytes,
        total_bytes=told.total_bytes,
    )


def _replica(stats: ReplicaStats) -> admin_pb2.ReplicaStats:
    return wire.build(
        admin_pb2.ReplicaStats,
        replica=stats.number,
        state=stats.state,
        running=stats.running,
        predicted_work=stats.work,
        restarts=stats.restarts,
        device=stats.device,
        step_time=stats.step_time,
        step_jobs=stats.step_jobs,
        step_rows=stats.step_rows,
        weight_bytes=stats.weight_bytes,
        host_memory_bytes=stats.host_memory_bytes,
        device_used_bytes=stats.device_used_bytes,
        device_total_bytes=stats.device_total_bytes,
    )


def _cost(engine: EngineStats) -> admin_pb2.StepCost:
    cost = engine.cost
    return admin_pb2.StepCost(fixed_ms=cost.fixed, token_ms=cost.token, pair_ms=cost.pair, error=engine.cost_error)


def _gpus(device: str | None) -> list[admin_pb2.GpuInfo]:
    return [] if device is None else [admin_pb2.GpuInfo(name=device, index=0)]
