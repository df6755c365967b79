"""ModelService: what can be asked of this server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_grpc.engine import Engine, EngineState
from omni_grpc.errors import NotFound
from omni_grpc.request import ImageFormat
from omni_grpc.resolve import Facts
from omni_grpc.server import convert
from omni_grpc.server.failures import status
from omni_grpc.server.requests import NAMED_TASKS, Reader, refused
from omni_grpc.server.served import GENERATE_IMAGE, unserved_paths
from omni_grpc.spec import GuidanceKind
from omni_grpc.v1 import generation_pb2, model_pb2, model_pb2_grpc, options_pb2, sampling_pb2

SCALES = (0.0, 100.0)
"""What `resolve.RULES` allows for both guidance scales."""

STATES: Mapping[EngineState, model_pb2.ModelState] = {
    EngineState.STARTING: model_pb2.MODEL_STATE_LOADING,
    EngineState.READY: model_pb2.MODEL_STATE_READY,
    EngineState.RESTARTING: model_pb2.MODEL_STATE_LOADING,
    # it takes no more jobs, and is about to leave memory
    EngineState.DRAINING: model_pb2.MODEL_STATE_AVAILABLE,
    EngineState.STOPPED: model_pb2.MODEL_STATE_AVAILABLE,
    EngineState.FAILED: model_pb2.MODEL_STATE_FAILED,
}


class ModelService(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        reader = Reader()
        wanted = {reader.choice("tasks", sampling_pb2.Task, number, NAMED_TASKS) for number in request.tasks}
        reader.check()
        fits = not wanted or wanted.intersection(self._engine.checkpoint.spec.tasks)
        return model_pb2.ListModelsResponse(models=[self._model()] if fits else [])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        if not request.model:
            raise refused("model", "is required")
        self._check_name(request.model)
        return model_pb2.GetModelResponse(model=self._model())

    async def ListLoras(self, request: model_pb2.ListLorasRequest, context: Any) -> model_pb2.ListLorasResponse:
        if request.model:
            self._check_name(request.model)
        # adapters cannot be loaded yet, so there are none
        return model_pb2.ListLorasResponse()

    def _check_name(self, name: str) -> None:
        if name != (served := self._engine.checkpoint.name):
            message = f"model {name!r} is not served here; served: {served}"
            raise NotFound(message, reason="MODEL_NOT_FOUND", metadata={"name": name})

    def _model(self) -> model_pb2.Model:
        checkpoint, ready, state = self._engine.checkpoint, self._engine.ready, self._engine.state
        refused = unserved_paths(generation_pb2.GenerateImageRequest.DESCRIPTOR, GENERATE_IMAGE)
        return model_pb2.Model(
            name=checkpoint.name,
            state=STATES[state],
            tasks=[convert.task(task) for task in checkpoint.spec.tasks],
            defaults=self._defaults(),
            guidance_kinds=[f"GUIDANCE_KIND_{kind.value}" for kind in checkpoint.spec.guidance],
            refusals=[model_pb2.Refusal(feature=path, reason="not yet served") for path in refused],
            limits=self._limits(),
            dtype=ready.dtype if ready else "",
            family=checkpoint.spec.family,
            pipeline=checkpoint.spec.name,
            preview_methods=[options_pb2.PREVIEW_METHOD_NONE, options_pb2.PREVIEW_METHOD_LATENT_RGB],
            image_formats=[convert.image_format(kind) for kind in ImageFormat],
            error=status(self._engine.failure) if self._engine.failure else None,
            weight_bytes=ready.weight_bytes if ready else 0,
        )

    def _defaults(self) -> sampling_pb2.SamplingParams:
        defaults = self._engine.checkpoint.defaults
        return sampling_pb2.SamplingParams(
            steps=defaults.steps,
            guidance=convert.guidance(defaults.guidance),
            num_outputs=1,
            cache=sampling_pb2.CacheOptions(off=sampling_pb2.CacheOff()),
        )

    def _limits(self) -> model_pb2.ModelLimits:
        checkpoint, limits = self._engine.checkpoint, self._engine.config.limits
        kinds, scales = checkpoint.spec.guidance, model_pb2.DoubleRange(min=SCALES[0], max=SCALES[1])
        return model_pb2.ModelLimits(
            min_width=checkpoint.limits.min_size,
            min_height=checkpoint.limits.min_size,
            max_width=checkpoint.limits.max_size,
            max_height=checkpoint.limits.max_size,
            max_pixels=Facts(checkpoint, limits).max_pixels,
            size_multiple=checkpoint.limits.size_multiple,
            default_width=checkpoint.defaults.width,
            default_height=checkpoint.defaults.height,
            max_steps=limits.max_steps,
            max_outputs=limits.max_outputs,
            max_prompt_chars=limits.max_prompt_chars,
            max_prompt_tokens=checkpoint.limits.max_prompt_tokens,
            guidance_scale=scales if GuidanceKind.EMBEDDED in kinds else None,
            true_cfg_scale=scales if GuidanceKind.TRUE_CFG in kinds else None,
        )
