"""Reads the fields of a message into our own types, and collects those that no type of ours can hold.

Unset fields stay None; zero and "" are ordinary values.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from google.protobuf.timestamp_pb2 import Timestamp

from omni_grpc.gate.refusals import Refusals
from omni_grpc.types.lora import Lora
from omni_grpc.types.request_options import (
    CACHE,
    EXTRA,
    LORAS,
    MEDIA,
    MEDIA_LIST,
    NUMBERS,
    SECONDS,
    SEEDS,
    RequestOption,
    options_of,
)
from omni_grpc.v1 import sampling_pb2
from omni_grpc.wire import known

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)

FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""Of a Timestamp: the years 1 to 9999, in Unix seconds."""


def members(kind: type[E], wire: EnumTypeWrapper) -> dict[int, E | None]:
    """Number on the wire -> member of our enum; None for the unspecified one."""
    prefix = wire.Name(0).removesuffix("UNSPECIFIED")
    return {number: kind(name.removeprefix(prefix)) if number else None for name, number in wire.items()}


def given(message: Message, field: str) -> Any:
    """The value of a field, None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


class Reader(Refusals):
    """Reads the fields of one message and collects what is wrong with them."""

    def choice(self, field: str, kind: EnumTypeWrapper, value: int, served: Mapping[int, T]) -> T | None:
        """The member that an enum value stands for. A value that is unknown or not served is refused by name."""
        if value in served:
            return served[value]
        known = ", ".join(kind.Name(number) for number in served)
        name = kind.Name(value) if value in kind.values() else str(value)
        self.refuse(field, f"{name} is not supported; use one of {known}")
        return None

    def seconds(self, field: str, message: Message) -> float | None:
        """A Duration field in seconds, None if it is not set. Negative ones are refused."""
        name = field.rpartition(".")[2]
        if not message.HasField(name):
            return None
        value: Duration = getattr(message, name)
        if value.seconds < 0 or value.nanos < 0:
            self.refuse(field, f"{value.seconds + value.nanos / 1e9:g} s is negative; nearest valid value: 0 s")
        return value.seconds + value.nanos / 1e9

    def moment(self, field: str, message: Message) -> float | None:
        """A Timestamp field in Unix seconds, None if it is not set. What is no time of a calendar is refused."""
        if not message.HasField(field):
            return None
        value: Timestamp = getattr(message, field)
        if not FIRST_SECOND <= value.seconds <= LAST_SECOND or not 0 <= value.nanos < 1_000_000_000:
            self.refuse(field, f"{value.seconds} s and {value.nanos} ns is no time between the years 1 and 9999")
        return known.seconds(value)

    def options(self, request: Any, kind: str) -> dict[str, Any]:
        """The options of a generation that are set, by name: not its media, its cache, and what is of the job alone."""
        found = {}
        for option in options_of(kind):
            if option.needs_server or option.name == "task" or option.type in (CACHE, MEDIA, MEDIA_LIST):
                continue
            if (value := self._option(request, option)) is not None:
                found[option.name] = value
        return found

    def _option(self, request: Any, option: RequestOption) -> Any:
        message = request
        *parents, leaf = option.path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        field = message.DESCRIPTOR.fields_by_name[leaf]
        value = getattr(message, leaf)
        if option.type.choices is not None:
            wire = EnumTypeWrapper(field.enum_type)
            return self.choice(option.path, wire, value, members(option.type.choices, wire))
        if option.type is SECONDS:
            return self.seconds(option.path, message)
        if option.type in (SEEDS, NUMBERS):
            return tuple(value) or None
        if option.type is LORAS:
            return tuple(_lora(reference) for reference in value) or None
        if option.type is EXTRA:
            return self.struct(option.path, value) or None
        return given(message, leaf) if field.has_presence else value or None

    def struct(self, path: str, value: Struct) -> dict[str, Any]:
        """A Struct as plain Python. Numbers that are not finite are refused by name: JSON, which a Struct stands for,
        has none.
        """
        return {name: self._plain(f"{path}.{name}", inner) for name, inner in value.fields.items()}

    def _plain(self, path: str, value: Value) -> Any:
        """A Struct has no integers, so a whole number becomes one. A value of no kind is None."""
        match value.WhichOneof("kind"):
            case "struct_value":
                return self.struct(path, value.struct_value)
            case "list_value":
                return [self._plain(f"{path}[{i}]", inner) for i, inner in enumerate(value.list_value.values)]
            case "number_value":
                number = value.number_value
                if not math.isfinite(number):
                    self.refuse(path, f"{number} is not a finite number")
                    return None
                return int(number) if number.is_integer() else number
            case "string_value" | "bool_value" as kind:
                return getattr(value, kind)
        return None


def _lora(reference: sampling_pb2.LoraRef) -> Lora:
    scale = given(reference, "scale")
    return Lora(lora_id=reference.lora_id, scale=1.0 if scale is None else scale, target=reference.target)
