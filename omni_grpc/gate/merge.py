"""Many asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")

BUFFER = 16
"""Items that are buffered for the reader; when the buffer is full, the streams wait."""


class Merged(Generic[T]):
    """Reads its streams concurrently, each in a task of its own, and yields their items in order of arrival.

    An async context manager: leaving it ends the tasks and closes the streams.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        # an item, or what ended a stream: an error, or None
        self._arrivals: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(BUFFER)
        self._open = 0

    async def __aenter__(self) -> Merged[T]:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, stream: AsyncGenerator[T]) -> None:
        """One more stream, at any time."""
        self._open += 1
        task = asyncio.create_task(self._read(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def next(self, timeout: float) -> T | None:
        """The next item, or None when every stream has ended. Raises TimeoutError after `timeout` seconds without an
        item, and what a stream raises.
        """
        async with asyncio.timeout(timeout):
            while self._open:
                arrival = await self._arrivals.get()
                if isinstance(arrival, Exception):
                    raise arrival
                if arrival is not None:
                    return arrival[0]
                self._open -= 1
        return None

    async def _read(self, stream: AsyncGenerator[T]) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await self._arrivals.put((item,))
        except Exception as error:  # noqa: BLE001 (raised again by `next`)
            ending = error
        await self._arrivals.put(ending)
