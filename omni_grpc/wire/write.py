"""Writes records as messages, by field names.

How a field is converted follows from the message's descriptor (`_conversions`). For each pair of a record type and a
message type, one function that converts all fields is compiled at first use (`_plan`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from omni_grpc.wire import known
from omni_grpc.wire.exceptions import ABSENT, rule

M = TypeVar("M", bound=Message)

ExtraFields = Callable[[Any], Mapping[str, Any]]
"""Gives more fields for the message of a record, by name. They replace the record's own."""

Convert = Callable[[Any, ExtraFields], Any]


def no_extra_fields(record: Any) -> Mapping[str, Any]:
    """The default of `to_message` and `build`."""
    return {}


def to_message(record: Any, kind: type[M], extra: ExtraFields = no_extra_fields) -> M:
    """The message of type `kind` for a record. `extra` is called with the record and with every record inside it.

    Raises TypeError for a field of the record that the message lacks.
    """
    descriptor: Any = kind.DESCRIPTOR
    return kind(**_fields(record, descriptor, extra))


def build(kind: type[M], extra: ExtraFields = no_extra_fields, /, **values: Any) -> M:
    """A message of type `kind` from values as records hold them: seconds, enum members, other records. None is unset.

    The name of a oneof is accepted too: the value then goes to the field named after its type.
    """
    descriptor: Any = kind.DESCRIPTOR
    return kind(**_converted(values, descriptor, extra))


@functools.cache
def arm(kind: type) -> str:
    """The field of a oneof that holds values of a type: the type's name in snake_case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def enum_prefix(enumeration: EnumDescriptor) -> str:
    """The prefix of an enum's names on the wire, for example "TASK_"."""
    return enumeration.values[0].name.removesuffix("UNSPECIFIED")


def compiled(parameters: str, expression: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Compiles an expression made of field names, as dataclasses does for its methods. A loop over the fields took 25 %
    longer, and every step event of every watcher comes through here.
    """
    function: Callable[..., Any] = eval(f"lambda {parameters}: {expression}", dict(names))
    return function


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """How the records of one type are written: `fields(record, extra)` converts all fields except the `oneofs`."""

    fields: Callable[[Any, ExtraFields], dict[str, Any]]
    conversions: Mapping[str, Convert]
    oneofs: tuple[str, ...]


def _fields(record: Any, descriptor: Descriptor, extra: ExtraFields) -> dict[str, Any]:
    """The fields of a record's message, as keyword arguments for it. Nested messages are dicts."""
    plan = _plan(record.__class__, descriptor)
    values = plan.fields(record, extra)
    for name, value in extra(record).items():
        convert = plan.conversions.get(name)
        values[name] = value if convert is None else convert(value, extra)
    if plan.oneofs:
        _choose_arms(values, plan.oneofs, plan.conversions, extra)
    return values


@functools.cache
def _plan(record: type, descriptor: Descriptor) -> _Plan:
    conversions, oneofs = _conversions(descriptor)
    entries, names, given = [], {}, []
    for index, field in enumerate(dataclasses.fields(record)):
        differs = rule(record, field.name)
        if not differs.sent:
            continue
        name, value = differs.name or field.name, f"record.{field.name}"
        if name in oneofs:
            given.append(name)
        elif name not in descriptor.fields_by_name:
            raise TypeError(f"{record.__name__}.{field.name}: {descriptor.full_name} has no field {name}")
        if name in conversions:
            names[f"convert_{index}"] = conversions[name]
            value = f"convert_{index}({value}, extra)"
        if differs.hides is not ABSENT:
            names[f"hidden_{index}"] = differs.hides
            value = f"None if record.{field.name} == hidden_{index} else {value}"
        entries.append(f"{name!r}: {value}")
    fields = compiled("record, extra", "{" + ", ".join(entries) + "}", names)
    return _Plan(fields=fields, conversions=conversions, oneofs=tuple(given))


def _converted(values: dict[str, Any], descriptor: Descriptor, extra: ExtraFields) -> dict[str, Any]:
    """Converts values by field name, in place."""
    conversions, oneofs = _conversions(descriptor)
    for name, value in values.items():
        if (convert := conversions.get(name)) is not None:
            values[name] = convert(value, extra)
    _choose_arms(values, oneofs, conversions, extra)
    return values


def _choose_arms(
    values: dict[str, Any], oneofs: tuple[str, ...], conversions: Mapping[str, Convert], extra: ExtraFields
) -> None:
    """Moves the value of a oneof to the field for its type."""
    for oneof in oneofs:
        if (value := values.pop(oneof, None)) is not None:
            name = arm(value.__class__)
            convert = conversions.get(name)
            values[name] = value if convert is None else convert(value, extra)


@functools.cache
def _conversions(descriptor: Descriptor) -> tuple[Mapping[str, Convert], tuple[str, ...]]:
    """What converts each field that needs a conversion, and the names of the oneofs."""
    found = {field.name: convert for field in descriptor.fields if (convert := _conversion(field)) is not None}
    # a proto3 optional field has a oneof of its own
    return found, tuple(oneof.name for oneof in descriptor.oneofs if not oneof.name.startswith("_"))


def _conversion(field: FieldDescriptor) -> Convert | None:
    """What converts the value of a field; None if it needs no conversion."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = _single(field.message_type.fields_by_name["value"])
        if entry is None:
            return None
        return lambda values, extra: {key: entry(value, extra) for key, value in values.items()}
    single = _single(field)
    if single is None or not field.is_repeated:
        return single
    return lambda values, extra: [single(value, extra) for value in values]


def _single(field: FieldDescriptor) -> Convert | None:
    if (descriptor := field.message_type) is not None:
        return known.WRITE.get(descriptor.full_name) or functools.partial(_message, descriptor)
    if field.enum_type is not None:
        return functools.partial(_member, enum_prefix(field.enum_type))
    return _bytes if field.type == FieldDescriptor.TYPE_BYTES else None


def _message(descriptor: Descriptor, value: Any, extra: ExtraFields) -> Any:
    return value if value is None or isinstance(value, Message) else _fields(value, descriptor, extra)


def _member(prefix: str, value: Any, extra: ExtraFields) -> Any:
    """An enum's member by its name on the wire; a number as it is."""
    return f"{prefix}{value}" if isinstance(value, str) else value


def _bytes(value: Any, extra: ExtraFields) -> Any:
    """A str is hexadecimal."""
    return bytes.fromhex(value) if isinstance(value, str) else value
