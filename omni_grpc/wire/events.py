"""Reads the event in a JobEvent. The field that holds it is named after its type in `omni_grpc.types.events`."""

from __future__ import annotations

import functools
import typing
from typing import Any

from google.protobuf.descriptor import Descriptor

from omni_grpc.types import events
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.wire.read import Read, reader
from omni_grpc.wire.write import arm


def read_event(message: JobEvent) -> events.Event | None:
    """The event in a message; None for heartbeats, chunks and kinds of events that this version does not know."""
    name = message.WhichOneof("event")
    read = None if name is None else _reader(message.DESCRIPTOR, name)
    if name is None or read is None:
        return None
    event: events.Event = read(getattr(message, name))
    return event


@functools.cache
def _reader(job_event: Descriptor, name: str) -> Read | None:
    """The reader of one field of the oneof; None if no type of event has its name."""
    kind: Any = {arm(kind): kind for kind in typing.get_args(events.Event)}.get(name)
    return None if kind is None else reader(kind, job_event.fields_by_name[name].message_type)
