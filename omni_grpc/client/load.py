"""The messages of LoadModel, as events."""

from __future__ import annotations

import dataclasses

from omni_grpc.client.events import member
from omni_grpc.types.load_progress import Loading, LoadPhase
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
    return Loading(
        phase=member(LoadPhase, admin_pb2.LoadPhase, message.phase, "LOAD_PHASE_"),
        component=message.component,
        file=message.file,
        done_bytes=message.done_bytes,
        total_bytes=message.total_bytes,
    )
