"""Lists, page by page. A token holds the place of the last item shown, so that items that come or go meanwhile neither
repeat nor hide others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from omni_grpc.types.errors import InvalidArgument, Violation

T = TypeVar("T")
Position = tuple[float, str]
"""Where an item stands in its list: its time in unix seconds, then its id."""

DEFAULT_SIZE = 50
MAX_SIZE = 1000


def page(items: Iterable[T], place: Callable[[T], Position], request: Message) -> tuple[list[T], str]:
    """A page of `items`, newest first, and the token of the next one ("" on the last).

    `request` has the fields page_size and page_token; its other fields are filters, to which its tokens are bound.
    Raises InvalidArgument for a token that is not of this list.
    """
    size, token = request.page_size, request.page_token  # type: ignore[attr-defined]
    filters = _filters(request)
    rest = sorted(items, key=place, reverse=True)
    if token:
        after = _read(token, filters)
        rest = [item for item in rest if place(item) < after]
    shown = rest[: min(size, MAX_SIZE) or DEFAULT_SIZE]
    return shown, _write(place(shown[-1]), filters) if len(shown) < len(rest) else ""


def _filters(request: Message) -> str:
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("page_size")
    bare.ClearField("page_token")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()[:16]


def _write(place: Position, filters: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([*place, filters]).encode()).decode()


def _read(token: str, filters: str) -> Position:
    try:
        moment, name, bound_to = json.loads(base64.urlsafe_b64decode(token.encode()))
        after = (float(moment), str(name))
    except (ValueError, TypeError, binascii.Error):
        raise _refusal("was not created by this server; start again without a token") from None
    if bound_to != filters:
        raise _refusal("was created with other filters; start again without a token")
    return after


def _refusal(description: str) -> InvalidArgument:
    violations = (Violation("page_token", description),)
    return InvalidArgument(f"page_token {description}", reason="BAD_PAGE_TOKEN", violations=violations)
