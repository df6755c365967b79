"""The messages of LoadModel, as the events that they are."""

from __future__ import annotations

import dataclasses

from omni_grpc.client.events import member
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.v1 import admin_pb2
from omni_grpc.v1.model_pb2 import Model


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The last event: the model takes jobs."""

    model: Model


LoadEvent = Loading | Loaded


def load_event(message: admin_pb2.LoadModelResponse) -> LoadEvent:
    """Raises Unimplemented for a phase that this client does not know."""
    if message.phase == admin_pb2.LOAD_PHASE_READY:
        return Loaded(message.model)
    return Loading(
        phase=member(LoadPhase, admin_pb2.LoadPhase, message.phase, "LOAD_PHASE_"),
        component=message.component,
        file=message.file,
        done_bytes=message.done_bytes,
        total_bytes=message.total_bytes,
    )
