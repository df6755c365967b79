"""ModelService: what the model of this server accepts."""

from __future__ import annotations

from typing import Any

from omni_grpc.engine import Engine
from omni_grpc.server.catalog import Catalog
from omni_grpc.server.fields import Reader
from omni_grpc.server.requests import NAMED_TASKS
from omni_grpc.types.lora import Adapter
from omni_grpc.v1 import model_pb2, model_pb2_grpc, sampling_pb2


class ModelService(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, engine: Engine, catalog: Catalog) -> None:
        self._engine = engine
        self._catalog = catalog

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        reader = Reader()
        wanted = {reader.choice("tasks", sampling_pb2.Task, number, NAMED_TASKS) for number in request.tasks}
        reader.check()
        fits = not wanted or wanted.intersection(self._engine.checkpoint.tasks)
        return model_pb2.ListModelsResponse(models=[self._catalog.model()] if fits else [])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        self._catalog.check_name(request.model)
        return model_pb2.GetModelResponse(model=self._catalog.model())

    async def ListLoras(self, request: model_pb2.ListLorasRequest, context: Any) -> model_pb2.ListLorasResponse:
        self._catalog.check_name(request.model)
        engine = self._engine
        running = [job.request.loras for job in engine.jobs.newest() if not job.state.terminal]
        return model_pb2.ListLorasResponse(
            loras=[
                _lora(
                    adapter,
                    engine.checkpoint.name,
                    in_use=sum(any(lora.lora_id == adapter.id for lora in loras) for loras in running),
                )
                for adapter in sorted(engine.facts.found.loras, key=lambda adapter: adapter.id)
            ]
        )


def _lora(value: Adapter, model: str, *, in_use: int) -> model_pb2.Lora:
    """Adapters are loaded when the worker starts, and stay."""
    return model_pb2.Lora(
        lora_id=value.id,
        model=model,
        source=value.file,
        rank=value.rank,
        size_bytes=value.size_bytes,
        pinned=True,
        targets=value.targets,
        format=value.format,
        keys_applied=value.keys_applied,
        keys_skipped=value.skipped,
        in_use=in_use,
        sha256=bytes.fromhex(value.sha256),
    )
