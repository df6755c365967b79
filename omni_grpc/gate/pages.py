"""Lists, page by page. A token holds the place of the last item shown, so that items that come or go meanwhile neither
repeat nor hide others.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from omni_grpc.store.records import Position
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.json_text import read_json

T = TypeVar("T")

DEFAULT_SIZE = 50
MAX_SIZE = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class PageRequest:
    """Which page of a list is asked for. A token is bound to the `filters` of its list, as its stack writes them."""

    size: int = 0
    token: str = ""
    filters: bytes = b""

    @property
    def limit(self) -> int:
        """The most items that are shown."""
        return min(self.size, MAX_SIZE) or DEFAULT_SIZE

    @property
    def after(self) -> Position | None:
        """Behind which place it begins; None for the first page. Raises InvalidArgument for a token that is not of this
        list.
        """
        return _read(self.token, self._digest) if self.token else None

    def cut(self, items: Sequence[T], place: Callable[[T], Position]) -> tuple[Sequence[T], str]:
        """The page, and the token of the next one ("" on the last). `items`: those behind `after`, newest first, at
        least one more than are shown if there are so many.
        """
        shown = items[: self.limit]
        return shown, self.token_after(place(shown[-1])) if len(shown) < len(items) else ""

    def token_after(self, place: Position) -> str:
        """The token of a page that begins behind this place."""
        return _write(place, self._digest)

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.filters).hexdigest()[:16]


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
