"""Notifies watchers of the whole server that something was added or changed."""

from __future__ import annotations

import asyncio


class Changes:
    """A counter that can be waited for. It belongs to one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout: float | None = None) -> bool:
        """True as soon as `count` is above `seen`; False when `timeout` seconds pass first."""
        if self.count > seen:
            return True
        try:
            await asyncio.wait_for(self._event.wait(), timeout)
        except TimeoutError:
            return False
        return True
