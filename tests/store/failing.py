"""What keeps jobs and bytes, behind what can go wrong: calls that fail, wait, take long, or never return."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from omni_grpc.store.seam import StoreError

FULL = "the disk of the job store is full: make room on it"


class Trouble:
    """What happens before each call is made. `seen` are the names of the calls that came, such as `jobs.write`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.delay = 0.0
        self._failing: dict[str, Callable[[], Exception]] = {}
        self._afterwards: set[str] = set()
        self._held: dict[str, asyncio.Event] = {}
        self._dead: asyncio.Future[None] | None = None

    def fail(
        self, *names: str, error: Callable[[], Exception] = lambda: StoreError(FULL), afterwards: bool = False
    ) -> None:
        """From now on these calls fail, or all of them; `afterwards`: once they have done what they were to do."""
        for name in names or ("",):
            self._failing[name] = error
            if afterwards:
                self._afterwards.add(name)

    def mend(self) -> None:
        """Calls are made again, and at once."""
        self._failing.clear()
        self._afterwards.clear()
        self.delay = 0.0
        for held in self._held.values():
            held.set()
        self._held.clear()

    def hold(self, name: str) -> None:
        """From now on these calls wait for `mend`."""
        self._held.setdefault(name, asyncio.Event())

    def sever(self) -> None:
        """No call returns any more, as those of a process that was killed."""
        self._dead = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Whoever waits for such a call is cancelled."""
        if self._dead is not None:
            self._dead.cancel()

    async def before(self, name: str) -> None:
        self.seen.append(name)
        if self._dead is not None:
            await asyncio.shield(self._dead)
        if self.delay:
            await asyncio.sleep(self.delay)
        while (held := self._held.get(name)) is not None:
            await held.wait()
        self._check(name, afterwards=False)

    def after(self, name: str) -> None:
        self._check(name, afterwards=True)

    def _check(self, name: str, *, afterwards: bool) -> None:
        for known in (name, ""):
            if known in self._failing and (known in self._afterwards) is afterwards:
                raise self._failing[known]()


class Troubled:
    """A store, a part of it, or blobs, behind `trouble`. Parts have their names before those of their calls."""

    def __init__(self, inner: Any, trouble: Trouble, *, prefix: str = "") -> None:
        self._inner = inner
        self._trouble = trouble
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("jobs", "files", "servers", "deliveries", "adapters"):
            return Troubled(found, self._trouble, prefix=f"{name}.")
        if name in ("open", "close", "listen"):
            return found
        if inspect.isasyncgenfunction(found):
            return functools.partial(self._pieces, self._prefix + name, found)
        if inspect.iscoroutinefunction(found):
            return functools.partial(self._call, self._prefix + name, found)
        return found

    async def _call(self, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        await self._trouble.before(name)
        result = await call(*args, **more)
        self._trouble.after(name)
        return result

    async def _pieces(self, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> AsyncIterator[Any]:
        await self._trouble.before(name)
        async for piece in call(*args, **more):
            yield piece
        self._trouble.after(name)
