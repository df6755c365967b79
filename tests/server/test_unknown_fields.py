"""A field that only a newer client knows is refused by its number, in every call and at every depth of its request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message

from omni_grpc.server.server import unserved_methods
from omni_grpc.v1 import admin_pb2, artifact_pb2, generation_pb2, job_pb2, model_pb2

from .service import Service, refusal

MODULES = (admin_pb2, artifact_pb2, generation_pb2, job_pb2, model_pb2)
RPCS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
UNKNOWN = b"\xf8\x07\x01"
"""Field 127, a varint."""


def messages_in(descriptor: Descriptor, above: tuple[Descriptor, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every message that a message may hold, first its own, which is empty; no type is within itself."""
    yield ()
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or inner in above:
            continue
        for rest in messages_in(inner, (*above, descriptor)):
            yield (field.name, *rest)


def put_unknown(message: Message, path: tuple[str, ...]) -> str:
    """Puts an unknown field into the message at a path; returns how a refusal names it."""
    names: list[str] = []
    for name in path:
        field, held = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
        names.append(name)
        if field.message_type.GetOptions().map_entry:
            message = held["key"]
            names.append("key")
        else:
            message = held.add() if field.is_repeated else held
    message.MergeFromString(UNKNOWN)
    return ".".join((*names, "#127"))


def call(service: Service, name: str, request: Message) -> Any:
    method, kind = RPCS[name], "stream" if RPCS[name].client_streaming else "unary"
    kind += "_stream" if method.server_streaming else "_unary"
    stub = getattr(service.channel, kind)(
        name,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    return stub(_only(request) if method.client_streaming else request)


async def _only(message: Message) -> AsyncIterator[Message]:
    yield message


@pytest.mark.parametrize("name", RPCS)
async def test_an_unknown_field_is_refused_by_every_call_at_every_depth(service: Service, name: str) -> None:
    kind = message_factory.GetMessageClass(RPCS[name].input_type)
    for path in messages_in(RPCS[name].input_type):
        request = kind()
        where = put_unknown(request, path)
        error = await refusal(call(service, name, request))
        if name in unserved_methods():
            assert (error.code, error.reason) == ("UNIMPLEMENTED", "NOT_YET_SERVED"), where
            continue
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_NOT_SUPPORTED"), where
        assert error.fields == [where]
        assert f"{where} is unknown to this server" in error.message


def test_the_calls_are_those_of_the_api() -> None:
    assert len(RPCS) == 30
    deepest = max(messages_in(job_pb2.CreateJobRequest.DESCRIPTOR), key=len)
    assert len(deepest) >= 4
    # a Struct holds its values in a map, and lists of them
    paths = set(messages_in(generation_pb2.GenerateImageRequest.DESCRIPTOR))
    assert ("sampling", "extra", "fields", "list_value") in paths
