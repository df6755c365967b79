"""Reads records from messages, by field names and type hints. One function is compiled for each pair of types."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from omni_grpc.types.errors import Unimplemented
from omni_grpc.wire import known
from omni_grpc.wire.exceptions import ABSENT, rule
from omni_grpc.wire.write import arm, compiled, enum_prefix

R = TypeVar("R")

Read = Callable[[Any], Any]


def from_message(kind: type[R], message: Message) -> R:
    """The record in a message. An unset field gets the record's default, or zero if it has no default.

    Raises Unimplemented (CLIENT_TOO_OLD) for an enum number that our enum lacks, and TypeError for a field of the
    record that the message lacks.
    """
    record_type: Any = kind
    record: R = reader(record_type, message.DESCRIPTOR)(message)
    return record


@functools.cache
def reader(kind: type, descriptor: Descriptor) -> Read:
    """The function that reads records of type `kind` from messages of one type."""
    hints = typing.get_type_hints(kind)
    names: dict[str, Any] = {"kind": kind}
    arguments = [
        f"{field.name}={_expression(kind, field, hints[field.name], descriptor, names)}"
        for field in dataclasses.fields(kind)
        if rule(kind, field.name).sent
    ]
    return compiled("message", f"kind({', '.join(arguments)})", names)


def _expression(
    kind: type, field: dataclasses.Field[Any], hint: Any, descriptor: Descriptor, names: dict[str, Any]
) -> str:
    """The Python expression that reads one field. Adds the functions and values that it uses to `names`."""
    differs = rule(kind, field.name)
    name, read, unset = differs.name or field.name, f"read_{field.name}", f"unset_{field.name}"
    value = f"message.{name}"
    if name in descriptor.oneofs_by_name:
        names[read] = _oneof(name, hint, descriptor)
        return f"{read}(message)"
    if (source := descriptor.fields_by_name.get(name)) is None:
        raise TypeError(f"{kind.__name__}.{field.name}: {descriptor.full_name} has no field {name}")
    if (take := _container(source, hint)) is not None:
        names[read] = take
    taken = value if take is None else f"{read}({value})"
    names[unset] = field.default if differs.reads is ABSENT else differs.reads
    if not source.has_presence:
        return taken if differs.reads is ABSENT else f"{taken} if {value} else {unset}"
    if names[unset] is dataclasses.MISSING or names[unset] == _zero(source):
        return taken
    return f"{taken} if message.HasField({name!r}) else {unset}"


def _oneof(name: str, hint: Any, descriptor: Descriptor) -> Read:
    """A reader for a oneof that has one field per type of a union. If none is set, it reads the first one, as zero."""
    kinds = {arm(kind): kind for kind in typing.get_args(hint)}
    readers = {source.name: _single(source, kinds[source.name]) for source in descriptor.oneofs_by_name[name].fields}
    first = next(iter(kinds))

    def read(message: Any) -> Any:
        found = message.WhichOneof(name) or first
        take, value = readers[found], getattr(message, found)
        return value if take is None else take(value)

    return read


def _container(source: FieldDescriptor, hint: Any) -> Read | None:
    """What converts the value of a field; None if it needs no conversion. Maps become dicts, lists become tuples."""
    if not source.is_repeated:
        return _single(source, _without_none(hint))
    parts = typing.get_args(hint)
    if source.message_type is not None and source.message_type.GetOptions().map_entry:
        entry = _single(source.message_type.fields_by_name["value"], parts[1])
        if entry is None:
            return dict
        return lambda values: {key: entry(value) for key, value in values.items()}
    take = _single(source, parts[0])
    return tuple if take is None else lambda values: tuple(map(take, values))


def _single(source: FieldDescriptor, hint: Any) -> Read | None:
    """What converts one value, or one element of a map or a list; None if it needs no conversion."""
    if (descriptor := source.message_type) is not None:
        return known.READ.get(descriptor.full_name) or reader(hint, descriptor)
    if source.enum_type is not None:
        return _member(hint, source.enum_type)
    if source.type == FieldDescriptor.TYPE_BYTES and hint is str:
        return bytes.hex
    return None


def _member(kind: type[enum.StrEnum], enumeration: EnumDescriptor) -> Read:
    prefix = enum_prefix(enumeration)
    members = {enumeration.values_by_name[f"{prefix}{member}"].number: member for member in kind}

    def read(number: int) -> Any:
        if number not in members:
            message = f"the server's answer has a {kind.__name__} ({number}) that this client does not know; upgrade it"
            raise Unimplemented(message, reason="CLIENT_TOO_OLD")
        return members[number]

    return read


def _zero(source: FieldDescriptor) -> Any:
    """What protobuf gives for an unset field, after conversion; ABSENT for messages without a plain zero."""
    if source.message_type is None:
        return source.default_value
    return 0.0 if known.READ.get(source.message_type.full_name) is known.seconds else ABSENT


def _without_none(hint: Any) -> Any:
    """X of `X | None`; any other hint as it is."""
    if not isinstance(hint, types.UnionType):
        return hint
    left = [part for part in typing.get_args(hint) if part is not types.NoneType]
    return left[0] if len(left) == 1 else hint
