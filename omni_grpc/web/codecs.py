"""Messages of Connect and gRPC-Web as bytes: they are parsed where the call is answered, so that what is wrong with
them has the same details as over gRPC.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from omni_grpc.server.incoming import Parse
from omni_grpc.types.errors import InvalidArgument, Violation


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """The bytes of a request, and what reads them."""

    data: bytes
    parse: Parse


class Proto:
    """Protobuf's binary format."""

    def name(self) -> str:
        return "proto"

    def encode(self, message: Message) -> bytes:
        return message.SerializeToString()

    def decode(self, data: bytes | bytearray, message_class: Any) -> Unread:
        return Unread(bytes(data), message_class.FromString)


class Json:
    """Protobuf's JSON (https://protobuf.dev/programming-guides/json): lowerCamelCase names, 64-bit integers as text."""

    def name(self) -> str:
        return "json"

    def encode(self, message: Message) -> bytes:
        return as_json(message).encode()

    def decode(self, data: bytes | bytearray, message_class: Any) -> Unread:
        def parse(given: bytes) -> Message:
            message: Message = read_json(given, message_class)
            return message

        return Unread(bytes(data), parse)


def as_json(message: Message) -> str:
    return json_format.MessageToJson(message, indent=None)


def read_json(data: bytes, message_class: Any) -> Any:
    """The message. Raises InvalidArgument (MALFORMED_MESSAGE) for what is no JSON of it, unknown fields included."""
    try:
        return json_format.Parse(data.decode(), message_class())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        rule = f"it is no JSON of {message_class.DESCRIPTOR.full_name}: {' '.join(str(error).split())}"
        raise InvalidArgument(
            f"the request cannot be read: {rule}", reason="MALFORMED_MESSAGE", violations=(Violation("request", rule),)
        ) from error
