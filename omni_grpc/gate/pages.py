"""Lists, page by page. A token holds the place of the last item shown, so that items that come or go meanwhile neither
repeat nor hide others.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.json_text import read_json

T = TypeVar("T")
Position = tuple[float, str]
"""Where an item stands in its list: its time in unix seconds, then its id."""

DEFAULT_SIZE = 50
MAX_SIZE = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class PageRequest:
    """Which page of a list is asked for. A token is bound to the `filters` of its list, as its stack writes them."""

    size: int = 0
    token: str = ""
    filters: bytes = b""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.filters).hexdigest()[:16]


def page(items: Iterable[T], place: Callable[[T], Position], request: PageRequest) -> tuple[list[T], str]:
    """A page of `items`, newest first, and the token of the next one ("" on the last).

    Raises InvalidArgument for a token that is not of this list.
    """
    rest = sorted(items, key=place, reverse=True)
    if request.token:
        after = _read(request.token, request.digest)
        rest = [item for item in rest if place(item) < after]
    shown = rest[: min(request.size, MAX_SIZE) or DEFAULT_SIZE]
    return shown, _write(place(shown[-1]), request.digest) if len(shown) < len(rest) else ""


def _write(place: Position, filters: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([*place, filters]).encode()).decode()


def _read(token: str, filters: str) -> Position:
    try:
        moment, name, bound_to = read_json(base64.urlsafe_b64decode(token.encode()))
        after = (float(moment), str(name))
    except (ValueError, TypeError, OverflowError):
        raise _refusal("was not created by this server; start again without a token") from None
    if bound_to != filters:
        raise _refusal("was created with other filters; start again without a token")
    return after


def _refusal(description: str) -> InvalidArgument:
    violations = (Violation("page_token", description),)
    return InvalidArgument(f"page_token {description}", reason="BAD_PAGE_TOKEN", violations=violations)
