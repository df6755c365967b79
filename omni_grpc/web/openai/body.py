"""The body of a request, JSON or a form, as names and values."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from omni_grpc.server.intake import LARGE
from omni_grpc.types.errors import InvalidArgument, OmniError, ResourceExhausted
from omni_grpc.types.json_text import read_json

MAX_FILES, MAX_FIELDS = 64, 1000
"""Of one form."""
MAX_DEPTH = 4
"""Of a name in brackets, such as `lora[][scale]`."""
_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_KEY = re.compile(r"\[([^\[\]]*)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file of a form. `mime_type` is "" where it says nothing."""

    data: bytes = dataclasses.field(repr=False)
    mime_type: str


class Text(str):
    """A value of a form. What it stands for, a number say, follows from its field."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """The values by name. `large`: whoever reads them does so in a thread."""

    values: dict[str, Any]
    large: bool


async def read_body(request: Request, most: int) -> Body:
    """Raises InvalidArgument (MALFORMED_MESSAGE) for what is neither a JSON object nor a form, ResourceExhausted
    (MESSAGE_TOO_LARGE) beyond `most` bytes.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(length, most)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    pieces = _limited(request, most)
    if kind == "multipart/form-data":
        return await _form(request, pieces)
    if kind and kind != "application/json":
        raise malformed(f"its Content-Type is {kind}; send application/json or multipart/form-data")
    data = b"".join([piece async for piece in pieces])
    large = len(data) > LARGE
    try:
        values = await asyncio.to_thread(read_json, data) if large else read_json(data)
    except ValueError as error:
        raise malformed(f"it is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise malformed("it is no JSON object")
    return Body(values, large)


def malformed(why: str) -> OmniError:
    return InvalidArgument(f"the body of the request cannot be read: {why}", reason="MALFORMED_MESSAGE")


def _too_large(size: object, most: int) -> OmniError:
    return ResourceExhausted(
        f"the request has {size} bytes; the largest that this server takes has {most} (--max-message-bytes); upload "
        "media by POST /files/assets and name them by file_id, or start the server with a higher limit",
        reason="MESSAGE_TOO_LARGE",
        metadata={"size_bytes": str(size), "max_message_bytes": str(most)},
    )


async def _limited(request: Request, most: int) -> AsyncGenerator[bytes]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise _too_large(f"more than {size - len(piece)}", most)
        yield piece


async def _form(request: Request, pieces: AsyncGenerator[bytes]) -> Body:
    try:
        parser = MultiPartParser(
            # the limit of the whole is that of a part
            request.headers, pieces, max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=1 << 62
        )  # fmt: skip
        form = await parser.parse()
    except MultiPartException as error:
        raise malformed(f"it is no form: {error.message}") from error
    except KeyError as error:
        raise malformed("it is no form: its Content-Type names no boundary") from error
    pairs: list[tuple[str, File | Text]] = []
    size = 0
    try:
        for name, value in form.multi_items():
            if isinstance(value, str):
                pairs.append((name, Text(value)))
            else:
                mime_type = (value.content_type or "").partition(";")[0].strip().lower()
                data = await value.read()
                pairs.append((name, File(data, "" if mime_type == "application/octet-stream" else mime_type)))
            size += len(pairs[-1][1].data if isinstance(pairs[-1][1], File) else pairs[-1][1])
    finally:
        await form.close()
    return Body(gathered(pairs), size > LARGE)


def gathered(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values of a form. `a[]`, and `a` several times, are lists, `a[b]` is an object, and `a[][b]` is a list of
    objects: an object ends where one of its names comes again, whatever index there is.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        found = _NAME.fullmatch(name)
        if found is None:
            raise malformed(f"{name!r} is no name of a field")
        keys = _KEY.findall(found.group(2))
        if len(keys) > MAX_DEPTH:
            raise malformed(f"{name!r} is nested too deep")
        _put(values, found.group(1), iter(keys), value, name)
    return values


def _put(into: dict[str, Any], name: str, keys: Iterator[str], value: Any, whole: str) -> None:
    key = next(keys, None)
    if key is None:
        if name not in into:
            into[name] = value
        else:
            into[name] = [*(into[name] if isinstance(into[name], list) else [into[name]]), value]
        return
    if key and not key.isdecimal():
        _put(_of_kind(into, name, {}, whole), key, keys, value, whole)
        return
    entries = _of_kind(into, name, [], whole)
    inner = next(keys, None)
    if inner is None:
        entries.append(value)
        return
    if not entries or not isinstance(entries[-1], dict) or inner in entries[-1]:
        entries.append({})
    _put(entries[-1], inner, keys, value, whole)


def _of_kind(into: dict[str, Any], name: str, empty: Any, whole: str) -> Any:
    """What a name stands for, which has to be a list or an object as `empty` is."""
    found = into.setdefault(name, empty)
    if type(found) is not type(empty):
        raise malformed(f"{whole!r} is both a value and a list or object")
    return found
