"""Which fields of a request this version serves: those in the table of options. Any other field that is set is refused
by name; none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO, served_paths

GENERATE_IMAGE, EDIT_IMAGE, GENERATE_VIDEO, GENERATE_AUDIO = map(served_paths, (IMAGE, EDIT, VIDEO, AUDIO))
"""Paths of the fields of each request."""
LOAD_MODEL = frozenset({"model", "engine_options"})


def refuse_unserved(message: Message, served: Collection[str]) -> None:
    """Raises InvalidArgument (FIELD_NOT_SUPPORTED) that names every field that is set and is not in `served`."""
    violations = tuple(
        Violation(path, "is not yet served; leave it unset") for path in _unserved_fields(message, served)
    )
    if violations:
        _refuse(violations)


def refuse_unknown(message: Message) -> None:
    """Raises InvalidArgument (FIELD_NOT_SUPPORTED) where a newer client set fields that this server does not know."""
    violations = tuple(
        Violation(path, "is unknown to this server, which is older than the client; leave it unset")
        for path in dict.fromkeys(_unknown_fields(message))
    )
    if violations:
        _refuse(violations)


def unserved_paths(descriptor: Any, served: Collection[str], prefix: str = "") -> Iterator[str]:
    """Every path of a message type that `refuse_unserved` would refuse."""
    for field in descriptor.fields:
        path = prefix + field.name
        if path in served:
            continue
        if field.message_type is not None and _opens(path, served):
            yield from unserved_paths(field.message_type, served, path + ".")
        else:
            yield path


def _refuse(violations: tuple[Violation, ...]) -> None:
    message = "; ".join(f"{v.field} {v.description}" for v in violations)
    raise InvalidArgument(message, reason="FIELD_NOT_SUPPORTED", violations=violations)


def _unserved_fields(message: Message, served: Collection[str], prefix: str = "") -> Iterator[str]:
    for field, value in message.ListFields():
        path = prefix + field.name
        if path in served:
            continue
        if _opens(path, served):
            yield from _unserved_fields(value, served, path + ".")
        else:
            yield path


def _opens(path: str, served: Collection[str]) -> bool:
    """Whether parts of this field are served, so that its parts count one by one."""
    return any(name.startswith(path + ".") for name in served)


def _unknown_fields(message: Message, prefix: str = "") -> Iterator[str]:
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield f"{prefix}#{unknown.field_number}"
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}."
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key, part in value.items():
                    yield from _unknown_fields(part, f"{path}{key}.")
            continue
        for part in value if field.is_repeated else (value,):
            yield from _unknown_fields(part, path)
