"""Records as JSON and back, by the type hints of their dataclasses.

A body says every field, so that it still means the same where a default changes later. A field that it lacks, of an
older version, gets its default; one that is unknown, of a newer version, is passed over. Nothing is lost by that:
bodies are written once and never changed. NaN and infinities are written as JavaScript does, bytes in base64.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from typing import Any, get_args

import pydantic

from omni_grpc.store.records import Entry, JobSpec
from omni_grpc.store.seam import Notice
from omni_grpc.types.events import Event
from omni_grpc.types.json_text import read_json

CONFIG = pydantic.ConfigDict(
    ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64", arbitrary_types_allowed=True
)
KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
"""Events by the name that is stored with them."""
INPUTS: Mapping[str, Any] = {"request": {"inputs"}}
"""What is left out of a JobSpec: the media of a request are blobs."""

logger = logging.getLogger(__name__)


class Unreadable(Exception):
    """A body that is damaged, or that a newer version has written."""


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    """Of a dataclass. The `| None` is there because pydantic takes no configuration for a dataclass by itself."""
    either: Any = kind | None
    return pydantic.TypeAdapter(either, config=CONFIG)


def prepare() -> None:
    """Makes what records are written and read with, which takes a tenth of a second: no job should wait for it."""
    kinds: tuple[Any, ...] = (JobSpec, *KINDS.values())
    for kind in kinds:
        _adapter(kind)


def encode(record: Any, exclude: Any = None) -> str:
    """The body of a dataclass."""
    return _adapter(record.__class__).dump_json(record, exclude=exclude, warnings=False).decode()


def decode(kind: Any, body: str) -> Any:
    """A dataclass from its body. Raises Unreadable."""
    try:
        found = _adapter(kind).validate_json(body)
    except pydantic.ValidationError as error:
        # not its text, which quotes what a user wrote
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise Unreadable(f"a stored {kind.__name__} cannot be read: {where}: {first['type']}") from None
    if found is None:
        raise Unreadable(f"a stored {kind.__name__} is empty")
    return found


def encode_spec(spec: JobSpec) -> str:
    return encode(spec, INPUTS)


def decode_spec(body: str) -> JobSpec:
    """Raises Unreadable."""
    spec: JobSpec = decode(JobSpec, body)
    return spec


def encode_event(event: Event) -> tuple[str, str]:
    """Its name and its body."""
    return type(event).__name__, encode(event)


def decode_event(name: str, body: str) -> Event:
    """Raises Unreadable."""
    if name not in KINDS:
        raise Unreadable(f"no event is called {name}: a newer version has written it")
    event: Event = decode(KINDS[name], body)
    return event


def encode_labels(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels))


def decode_labels(body: str) -> Mapping[str, str]:
    labels: dict[str, str] = read_json(body)
    return labels


def encode_notice(notice: Notice, sender: str, limit: int) -> str:
    """A notice on one line of ASCII, of fewer than `limit` bytes: without its progress where it would be longer."""
    content = {"sender": sender, "job_id": notice.job_id, "seq": notice.seq}
    content |= {"cancel": notice.cancel, "gone": notice.gone, "watched": notice.watched, "adapters": notice.adapters}
    if notice.progress is not None:
        name, body = encode_event(notice.progress.event)
        whole = json.dumps({**content, "progress": [notice.progress.seq, notice.progress.time, name, body]})
        if len(whole) < limit:
            return whole
    return json.dumps(content)


def decode_notice(text: str) -> tuple[str, Notice]:
    """The sender and the notice. Raises Unreadable for what is none, and for a progress that is unknown here."""
    try:
        content = read_json(text)
        progress = None
        if "progress" in content:
            seq, time, name, body = content["progress"]
            progress = Entry(seq, time, decode_event(name, body))
        notice = Notice(
            job_id=content["job_id"],
            seq=content["seq"],
            progress=progress,
            cancel=content["cancel"],
            gone=content["gone"],
            watched=content["watched"],
            # a server of before adapters were kept does not say it
            adapters=content.get("adapters", False),
        )
        return content["sender"], notice
    except (ValueError, TypeError, KeyError) as error:
        raise Unreadable(f"a notice of another server cannot be read: {type(error).__name__}") from error
