"""What a fault is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc

from ..lives import SQLITE
from .stage import Setting, Stage


@contextlib.contextmanager
def nothing(setting: Setting) -> Iterator[None]:
    """Stands around the server."""
    yield None


def can(*_: object) -> str:
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """`around` is entered before the server starts, and may change its setting; what it gives is handed to `strike`,
    which begins the fault and returns when it is over. `harmless`: no stream and no call of other clients may break.
    `within`: seconds after which a new job must have been taken and done. `lacks`: why this machine cannot have it.
    """

    name: str
    what: str
    strike: Callable[[Stage, Any, float], None]
    """With the seconds that it lasts."""
    around: Callable[[Setting], AbstractContextManager[Any]] = nothing
    stores: tuple[str, ...] = (SQLITE,)
    seconds: float = 2.0
    harmless: bool = False
    within: float = 15.0
    also: tuple[grpc.StatusCode, ...] = ()
    """Codes that its clients bear, beside those of a server that is away."""
    lacks: Callable[[], str] = can
