"""Named timers on the event loop: each owner has at most one timer of a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Fire = Callable[[str, str, float], None]
"""Called with owner, name and seconds when the time is up."""

OnError = Callable[[str, str, Exception], None]
"""Called with owner and name of a timer, and what its call raised."""


class Timers:
    """`set` starts a timer or restarts it; with None as seconds there is no timer."""

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._handles: dict[str, dict[str, asyncio.TimerHandle]] = {}

    def set(self, owner: str, name: str, seconds: float | None, fire: Fire) -> None:
        self.clear(owner, name)
        if seconds is None:
            return
        handle = asyncio.get_running_loop().call_later(seconds, self._fire, owner, name, seconds, fire)
        self._handles.setdefault(owner, {})[name] = handle

    def clear(self, owner: str, name: str) -> None:
        """Stops one timer, if it is there."""
        names = self._handles.get(owner, {})
        if (handle := names.pop(name, None)) is not None:
            handle.cancel()
        if not names:
            self._handles.pop(owner, None)

    def clear_all(self, owner: str) -> None:
        """Stops every timer of an owner."""
        for handle in self._handles.pop(owner, {}).values():
            handle.cancel()

    def stop(self) -> None:
        """Stops every timer."""
        for owner in list(self._handles):
            self.clear_all(owner)

    def _fire(self, owner: str, name: str, seconds: float, fire: Fire) -> None:
        self.clear(owner, name)
        try:
            fire(owner, name, seconds)
        except Exception as error:  # noqa: BLE001 - what it means is for the one who knows the owner
            self._on_error(owner, name, error)
