"""What a generation was asked for, in the words of its caller: the part of its parameters that files hold."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

Traits = Mapping[str, Sequence[Mapping[str, str]]]
"""Option -> for each of its media what tells it from others: sha256 of the file, uri without its query, or asset_id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What one generation was asked for. `kind`: image, edit, video or audio. `options`: by name, without media, those
    of the job and what was not set; all of them JSON. `server`: the version of the server, "" where nobody asked it.
    """

    kind: str
    model: str
    prompt: str
    options: Mapping[str, object]
    inputs: Traits = dataclasses.field(default_factory=dict)
    server: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """What the worker writes into the outputs of a request that asks for it, besides what it finds out itself.
    `defaults_used` maps a field to the default it got.
    """

    asked: Requested
    defaults_used: Mapping[str, str] = dataclasses.field(default_factory=dict)


def traits(*, data: bytes | None = None, uri: str | None = None, asset_id: str | None = None) -> Mapping[str, str]:
    """What tells a medium from others; None: it has no such source. The query of a URI stays out, since it may hold a
    signature.
    """
    if data is not None:
        return {"sha256": hashlib.sha256(data).hexdigest()}
    if uri is not None and uri.lower().startswith("data:"):
        return {"sha256 of its data URL": hashlib.sha256(uri.encode()).hexdigest()}
    if uri is not None:
        return {"uri": urlunsplit(urlsplit(uri)._replace(query="", fragment=""))}
    return {} if asset_id is None else {"asset_id": asset_id}
