"""Turns the values of a body into a request message, by a table of fields, and remembers the caller's names."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from omni_grpc.config.command_line import meant
from omni_grpc.gate.refusals import Refusals
from omni_grpc.types import request_options as options
from omni_grpc.types.errors import OmniError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.request_options import ValueType
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import GuidanceKind
from omni_grpc.v1 import media_pb2
from omni_grpc.web.openai.body import File, Text

SHOWN_CHARS = 60
"""Of a value that is refused."""
FLAGS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
SOURCES = ("image_url", "video_url", "audio_url", "url")
"""Names under which an object has the address of a medium."""

OPEN = ("sampling.extra", "sampling.loras")
"""Fields whose parts the caller names as we do."""

Take = Callable[["Reading", str, Any], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What becomes of one field: it is ours at `path`, where `take` puts it if it is not just set, or it changes
    nothing (`ignored` says why, and the reply does too), or it is refused, with what to do instead. Values in `unless`
    ask for nothing.
    """

    path: str = ""
    take: Take | None = None
    ignored: str = ""
    refused: str = ""
    unless: tuple[object, ...] = ()


Fields = Mapping[str, Field]


class Reading:
    """One body on its way to a request message. What is wrong with it is collected, under the caller's names.

    `guided`: how the model can be guided. `reply`: what the caller wants of the answer and not of the job.
    """

    def __init__(self, kind: str, message: Any, fields: Fields, guided: Collection[GuidanceKind] = ()) -> None:
        self.message = message
        self.guided = guided
        self.values: Mapping[str, Any] = {}
        self.reply: dict[str, Any] = {}
        self.warnings: list[RequestWarning] = []
        self.transparent: set[str] = set()
        """Inputs that say by their transparency what is made anew."""
        self._fields = fields
        self._refusals = Refusals()
        self._types = {option.path: option.type for option in options.options_of(kind)}
        self._names: dict[str, str] = {}
        """Our paths that are set -> the caller's names."""

    def read(self, values: Mapping[str, Any]) -> None:
        """Raises InvalidArgument with every field that is unknown, has no counterpart, or is of the wrong type."""
        self.values = {name: value for name, value in values.items() if value is not None}
        for name, value in self.values.items():
            field = self._fields.get(name)
            if field is None:
                self.refuse(name, f"is unknown{meant(name, self._fields)}")
            elif any(str(value).lower() == str(one).lower() for one in field.unless):
                continue
            elif field.refused:
                self.refuse(name, field.refused)
            elif field.ignored:
                self.warn(name, "FIELD_WITHOUT_EFFECT", f"has no effect: {field.ignored}", value)
            elif field.take is not None:
                field.take(self, name, value)
            else:
                self.set(name, field.path, value)
        self._refusals.check()

    # --- what the table's functions call ------------------------------------------------------------------------------

    def refuse(self, name: str, why: str) -> None:
        self._refusals.refuse(name, why)

    def warn(self, name: str, code: str, message: str, value: object, applied: str = "") -> None:
        warning = RequestWarning(code=code, field=name, message=message, requested=shown(value), applied=applied)
        self.warnings.append(warning)

    def named(self, path: str, name: str) -> bool:
        """Notes that `name` sets `path`; refuses it, and is False, where another name has."""
        if (other := self._names.setdefault(path, name)) == name:
            return True
        self.refuse(name, f"says the same as {other}; send one of them")
        return False

    def note(self, path: str, name: str) -> None:
        """Notes the name under which refusals of `path` are told."""
        self._names.setdefault(path, name)

    def set(self, name: str, path: str, value: Any) -> None:
        """Sets our field to a value that the caller calls `name`."""
        if not self.named(path, name):
            return
        message = self.message
        *parents, leaf = path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        field = message.DESCRIPTOR.fields_by_name[leaf]
        if (other := self._other_arm(message, field, parents)) is not None:
            self.refuse(name, f"does not go with {other}; send one of them")
            return
        kind = self._types.get(path) or _type_of(field)
        try:
            _put(message, field, kind, typed(kind, value))
        except (TypeError, ValueError, OverflowError):
            self.refuse(name, f"is {shown(value)}, expected {kind.expected}")

    def _other_arm(self, message: Any, field: FieldDescriptor, parents: list[str]) -> str | None:
        """The caller's name of what is set and would be lost with this field, of which a message has one at most."""
        if (oneof := field.containing_oneof) is None or (arm := message.WhichOneof(oneof.name)) in (None, field.name):
            return None
        return self.param(".".join([*parents, arm]))

    def flag(self, name: str, value: Any) -> bool | None:
        """A truth value, None for one that is refused."""
        try:
            return bool(typed(options.FLAG, value))
        except (TypeError, ValueError):
            self.refuse(name, f"is {shown(value)}, expected true or false")
            return None

    def choice(self, name: str, value: Any, among: Collection[str]) -> str | None:
        if isinstance(value, str) and value in among:
            return str(value)
        self.refuse(name, f"is {shown(value)}; use {' or '.join(among)}")
        return None

    def media(self, name: str, path: str, value: Any) -> None:
        """Puts one medium, or all of a list, where our field has them."""
        field = self.message.DESCRIPTOR.fields_by_name[path]
        if isinstance(value, Text) and value.lstrip()[:1] in ("{", "["):
            value = _json(value)
        entries = value if isinstance(value, list) else [value]
        if field.is_repeated:
            into = getattr(self.message, path)
            for i, entry in enumerate(entries):
                self._names[f"{path}[{len(into)}]"] = name if len(entries) == 1 else f"{name}[{i}]"
                into.append(self._medium(name, entry))
            self._names.setdefault(path, name)
        elif len(entries) != 1:
            self.refuse(name, f"has {len(entries)} entries; send one")
        elif self.named(path, name):
            getattr(self.message, path).CopyFrom(self._medium(name, entries[0]))

    def _medium(self, name: str, value: Any) -> media_pb2.MediaInput:
        """An empty one for what is no medium, which is refused."""
        try:
            found = _source(value)
        except ValueError:
            found = None
        if found is None:
            objects = f"an object with file_id or one of {', '.join(SOURCES)}"
            self.refuse(name, f"is {shown(value)}; send a file, a data: URL, base64, or {objects}")
        return found or media_pb2.MediaInput()

    # --- our names as the caller's ------------------------------------------------------------------------------------

    def renamed(self, error: OmniError) -> OmniError:
        """The same error with the names of fields that the caller used."""
        failure = error.failure
        if not failure.violations:
            return error
        violations = tuple(Violation(self.param(one.field), one.description) for one in failure.violations)
        message = failure.message
        for joint in (": ", " "):
            if message == "; ".join(f"{one.field}{joint}{one.description}" for one in failure.violations):
                message = "; ".join(f"{one.field}{joint}{one.description}" for one in violations)
        return dataclasses.replace(failure, violations=violations, message=message).error()

    def told(self, warnings: Collection[RequestWarning]) -> list[dict[str, str]]:
        """The warnings of this reading and those of its job, as the reply has them."""
        ours = [dataclasses.replace(one, field=self.param(one.field)) for one in warnings]
        return [_told(one) for one in (*self.warnings, *ours)]

    def param(self, path: str) -> str:
        """The name that a caller knows our field by; of several, each once."""
        return ", ".join(dict.fromkeys(self._param(part) for part in path.split(", ")))

    def _param(self, path: str) -> str:
        for whole in _shorter(path):
            if (name := self._names.get(whole)) is not None:
                return name + path[len(whole) :] if whole in OPEN else name
        leaf = path.rpartition(".")[2]
        # their own name for it first
        named = (name for name, field in self._fields.items() if field.path == path and name != leaf)
        return next(named, leaf if path.startswith("sampling.") else path)


def _source(value: Any) -> media_pb2.MediaInput | None:
    """A medium, None for what is none. Raises ValueError for text that is none either: no base64, or no UTF-8."""
    match value:
        case File():
            return media_pb2.MediaInput(data=value.data, mime_type=value.mime_type)
        case {"file_id": str(asset_id), **others} if not others:
            return media_pb2.MediaInput(asset_id=asset_id)
        case {**given} if len(given) == 1 and next(iter(given)) in SOURCES:
            (value,) = given.values()
            if isinstance(value, dict):
                value = value.get("url")
    if not isinstance(value, str):
        return None
    if re.match(r"data:|[a-zA-Z][a-zA-Z0-9+.-]*://", value):
        return media_pb2.MediaInput(uri=value)
    return media_pb2.MediaInput(data=base64.b64decode(value, validate=True))


def warnings_of(warnings: Collection[RequestWarning]) -> list[dict[str, str]]:
    """Those of a job whose request is not at hand."""
    return [_told(one) for one in warnings]


def _told(warning: RequestWarning) -> dict[str, str]:
    found = {"code": warning.code.lower(), "param": warning.field, "message": warning.message}
    return found | {
        name: value for name, value in (("requested", warning.requested), ("applied", warning.applied)) if value
    }


def shown(value: object) -> str:
    """A value for people, of any length."""
    if isinstance(value, File):
        return f"a file of {len(value.data)} bytes"
    text = repr(str(value)) if isinstance(value, str) else json.dumps(value, default=shown)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def typed(kind: ValueType, value: Any) -> Any:
    """The value as plain Python. Raises TypeError or ValueError. What a form says is read as its type wants it."""
    if isinstance(value, Text):
        value = _read(kind, value)
    elif isinstance(value, list):
        value = [_json(one) if isinstance(one, Text) else one for one in value]
    return kind.normalize(value)


def _read(kind: ValueType, text: Text) -> Any:
    if kind is options.TEXT or kind.choices is not None:
        return str(text)
    if kind is options.FLAG:
        return FLAGS.get(text.lower(), text)
    return _json(text)


def _json(text: str) -> Any:
    """What a text of a form stands for, the text itself where it is no JSON."""
    try:
        return read_json(text)
    except ValueError:
        return str(text)


def plain(value: Any) -> Any:
    """An object of a form, whose values may be JSON, as JSON has it."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return _json(value) if isinstance(value, Text) else value


def _type_of(field: FieldDescriptor) -> ValueType:
    """The type of a field that is no option of its own."""
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE if field.is_repeated:
            return NUMBERS
        case FieldDescriptor.TYPE_DOUBLE:
            return options.NUMBER
        case FieldDescriptor.TYPE_UINT32:
            return options.COUNT
        case FieldDescriptor.TYPE_BOOL:
            return options.FLAG
    return options.TEXT


def _numbers(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError(value)
    return tuple(options.NUMBER.normalize(one) for one in value)


NUMBERS = ValueType(name="NUMBERS", annotation="Sequence[float]", expected="a list of numbers", normalize=_numbers)


def _put(message: Any, field: FieldDescriptor, kind: ValueType, value: Any) -> None:
    name = field.name
    if (wire := field.enum_type) is not None:
        prefix = wire.values[0].name.removesuffix("UNSPECIFIED")
        setattr(message, name, wire.values_by_name[prefix + value].number)
    elif kind is options.SECONDS:
        getattr(message, name).FromNanoseconds(round(value * 1e9))
    elif kind is options.EXTRA or kind is options.LABELS:
        getattr(message, name).update(value)
    elif field.is_repeated:
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def _shorter(path: str) -> Iterator[str]:
    """A path, then without its last part, and so on."""
    while path:
        yield path
        path = path[: path.rindex("[")] if path.endswith("]") else path.rpartition(".")[0]
