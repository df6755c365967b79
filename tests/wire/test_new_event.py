"""A new kind of event is declared in the proto files and in types/events.py, and emitted. No other list names it."""

from __future__ import annotations

import dataclasses
import io
import types
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from omni_grpc.client.progress import describe, progress_display
from omni_grpc.config import LimitsConfig
from omni_grpc.gate.follow import Pace
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.server.messages import Messages
from omni_grpc.store.job import Job, new_record
from omni_grpc.store.records import JobSpec, JobState
from omni_grpc.types import events
from omni_grpc.types.events import Queued, Started
from omni_grpc.types.request import Draft
from omni_grpc.v1 import event_pb2
from omni_grpc.wire import read_event
from tests.toy import toy_checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReHeated:
    """An event that this version does not have."""

    celsius: float
    wait: float
    nodes: tuple[str, ...]
    spent: Mapping[str, int]


def grown_job_event() -> Any:
    """JobEvent with one more arm, `re_heated`, from a proto file of its own."""
    file = descriptor_pb2.FileDescriptorProto(
        name="omni_grpc_test/new_event.proto",
        package="omni_grpc_test",
        syntax="proto3",
        dependency=["google/protobuf/duration.proto", event_pb2.DESCRIPTOR.name, *_names(event_pb2)],
    )
    kind = descriptor_pb2.FieldDescriptorProto
    heated = file.message_type.add(name="ReHeated")
    heated.field.add(name="celsius", number=1, type=kind.TYPE_DOUBLE, label=kind.LABEL_OPTIONAL)
    duration = ".google.protobuf.Duration"
    heated.field.add(name="wait", number=2, type=kind.TYPE_MESSAGE, type_name=duration, label=kind.LABEL_OPTIONAL)
    heated.field.add(name="nodes", number=3, type=kind.TYPE_STRING, label=kind.LABEL_REPEATED)
    entry = heated.nested_type.add(name="SpentEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kind.TYPE_UINT32, label=kind.LABEL_OPTIONAL)
    of_entry = ".omni_grpc_test.ReHeated.SpentEntry"
    heated.field.add(name="spent", number=4, type=kind.TYPE_MESSAGE, type_name=of_entry, label=kind.LABEL_REPEATED)
    grown = file.message_type.add()
    event_pb2.JobEvent.DESCRIPTOR.CopyToProto(grown)
    new = ".omni_grpc_test.ReHeated"
    grown.field.add(
        name="re_heated", number=99, type=kind.TYPE_MESSAGE, type_name=new, label=kind.LABEL_OPTIONAL, oneof_index=0
    )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("omni_grpc_test.JobEvent"))


def _names(module: types.ModuleType) -> list[str]:
    return [name for file in module.DESCRIPTOR.dependencies if (name := file.name) != "google/protobuf/duration.proto"]


@pytest.fixture(scope="module")
def grown() -> Any:
    return grown_job_event()


def test_a_new_event_needs_its_message_and_its_type_alone(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ServingFacts(toy_checkpoint(), LimitsConfig())
    request = resolve_request(Draft(model="toy", prompt="x"), facts, id="job_1").request
    job = Job(new_record(JobSpec(request=request)))
    heated = ReHeated(celsius=71.5, wait=0.25, nodes=("a", "b"), spent={"fan": 3})
    started = Started(model="toy", seeds=(1,), total_steps=2, width=8, height=8, queue_wait=0.0)
    job.append(Queued(position=0, queue_depth=1))
    job.append(started)

    # what the proto file and types/events.py would say
    monkeypatch.setattr(event_pb2, "JobEvent", grown)
    monkeypatch.setattr(events, "Event", events.Event | ReHeated)
    entry = job.append(heated)  # type: ignore[arg-type]

    assert job.state is JobState.RUNNING
    pace = Pace(interval=10.0, after_seq=2)
    update = pace.take(entry)
    assert update is not None, "only steps and decoding wait"
    message = Messages(types.SimpleNamespace(ready=None)).event(job, update)  # type: ignore[arg-type]
    assert (message.job_id, message.seq, message.WhichOneof("event")) == ("job_1", 3, "re_heated")

    encoded = message.SerializeToString()
    assert read_event(grown.FromString(encoded)) == heated
    text = "re heated: celsius 71.5, wait 0.25, nodes ('a', 'b'), spent {'fan': 3}"
    assert describe(heated) == text  # type: ignore[arg-type]
    shown = io.StringIO()
    with progress_display(stream=shown) as show:
        show(heated)  # type: ignore[arg-type]
    assert shown.getvalue() == f"{text}\n"


def test_a_client_from_before_passes_it_over(grown: Any) -> None:
    message = grown(job_id="job_1", seq=3, re_heated={"celsius": 71.5})
    before = event_pb2.JobEvent.FromString(message.SerializeToString())
    assert (before.job_id, before.seq, read_event(before)) == ("job_1", 3, None)


def test_an_event_without_an_arm_is_an_error() -> None:
    @dataclasses.dataclass(frozen=True)
    class Misplaced:
        pass

    facts = ServingFacts(toy_checkpoint(), LimitsConfig())
    request = resolve_request(Draft(model="toy", prompt="x"), facts, id="job_1").request
    job = Job(new_record(JobSpec(request=request)))
    update = Pace(interval=0.0).take(job.append(Misplaced()))  # type: ignore[arg-type]
    assert update is not None
    with pytest.raises(ValueError, match="misplaced"):
        Messages(types.SimpleNamespace(ready=None)).event(job, update)  # type: ignore[arg-type]
