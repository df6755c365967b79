"""The messages of LoadModel, as events."""

from __future__ import annotations

import dataclasses

from omni_grpc import wire
from omni_grpc.types.load_progress import Loading
from omni_grpc.v1 import admin_pb2
from omni_grpc.v1.model_pb2 import Model


@dataclasses.dataclass(frozen=True, slots=True)
class ModelReady:
    """The last event: the model accepts jobs."""

    model: Model


Loaded = ModelReady
"""The former name of `ModelReady`."""

LoadEvent = Loading | ModelReady


def load_event(message: admin_pb2.LoadModelResponse) -> LoadEvent:
    """The event in a message. Raises Unimplemented for a phase that this client does not know."""
    if message.phase == admin_pb2.LOAD_PHASE_READY:
        return ModelReady(message.model)
    return wire.from_message(Loading, message)
