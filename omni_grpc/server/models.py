"""ModelService: what the model of this server accepts."""

from __future__ import annotations

from omni_grpc.gate import Gate
from omni_grpc.server.catalog import model_message
from omni_grpc.server.fields import Reader
from omni_grpc.server.requests import NAMED_TASKS
from omni_grpc.types.caller import Caller
from omni_grpc.types.lora import Adapter
from omni_grpc.v1 import model_pb2, model_pb2_grpc, sampling_pb2


class ModelService(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def ListModels(self, request: model_pb2.ListModelsRequest, caller: Caller) -> model_pb2.ListModelsResponse:
        reader = Reader()
        asked = [reader.choice("tasks", sampling_pb2.Task, number, NAMED_TASKS) for number in request.tasks]
        reader.check()
        models = self._gate.models.served(caller, [task for task in asked if task is not None])
        return model_pb2.ListModelsResponse(models=[model_message(view) for view in models])

    async def GetModel(self, request: model_pb2.GetModelRequest, caller: Caller) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=model_message(self._gate.models.get(caller, request.model)))

    async def ListLoras(self, request: model_pb2.ListLorasRequest, caller: Caller) -> model_pb2.ListLorasResponse:
        found = self._gate.models.loras(caller, request.model)
        return model_pb2.ListLorasResponse(
            loras=[_lora(adapter, model, in_use=in_use) for adapter, model, in_use in found]
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
        keys_skipped=[f"{key} ({why})" for key, why in value.skipped.items()],
        in_use=in_use,
        sha256=bytes.fromhex(value.sha256),
        warnings=value.warnings,
    )
