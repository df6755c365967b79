"""Records to store: plain ones, and ones in which every field says something."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from omni_grpc.store.records import Entry, JobRecord, JobSpec, JobState, JobWrite
from omni_grpc.types import events
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance, Request, Task

REQUEST = Request(
    id="request",
    model="tiny",
    prompt="a red circle",
    task=Task.TEXT_TO_IMAGE,
    negative_prompt=None,
    width=64,
    height=64,
    steps=4,
    guidance=Guidance(),
    seeds=(7,),
    num_outputs=1,
    output_format=ImageFormat.PNG,
)
SPEC = JobSpec(request=REQUEST)


def record(number: int = 0, **changes: Any) -> JobRecord:
    """Of job `job-0001` and so on, created at that second."""
    known: dict[str, Any] = {
        "id": f"job-{number:04}",
        "spec": SPEC,
        "model": "tiny",
        "task": Task.TEXT_TO_IMAGE.value,
        "state": JobState.QUEUED,
        "create_time": float(number),
        "server": "one",
    }
    return JobRecord(**(known | changes))


def queued(seq: int = 1) -> Entry:
    return Entry(seq, 1000.5 + seq, events.Queued(position=0, queue_depth=seq))


def new(*records: JobRecord) -> list[JobWrite]:
    return [JobWrite(record=one, entries=(queued(),), created=True) for one in records]


def full(kind: Any, number: int = 3) -> Any:
    """A value of a type, from its hints: every field is set, and every container has something in it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return full(next(one for one in inner if one is not type(None)), number)
    if origin is tuple:
        return tuple(full(one, number + at) for at, one in enumerate(one for one in inner if one is not Ellipsis))
    if origin is Sequence:
        return [full(inner[0], number)]
    if origin is not None and issubclass(origin, Mapping):
        return {f"key {number}": full(inner[1], number)}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{one.name: full(hints[one.name], number + at) for at, one in enumerate(dataclasses.fields(kind))})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[number % len(kind)]
    plain = {
        int: number,
        float: number + 0.25,
        str: f"text {number}",
        bool: True,
        bytes: b"\xff\0",
        object: [None, 1.5],
    }
    return plain[kind]
