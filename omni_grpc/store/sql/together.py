"""Questions that come at the same time, asked together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

GATHER = 0.005
"""Seconds that a transaction waits for more questions, where the one before it had more than one."""
AT_ONCE = 200
"""Most questions in one transaction."""


class Together(Generic[K, V]):
    """Asks for many at once what single callers ask: a transaction costs more than a row. `ask` gets different keys and
    says what there is of them. A question that comes while others are under way waits for the next transaction, so
    that it sees all that was committed before.
    """

    def __init__(self, ask: Callable[[Sequence[K]], Coroutine[Any, Any, Mapping[K, V]]]) -> None:
        self._ask = ask
        self._waiting: dict[K, asyncio.Future[V | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def of(self, key: K) -> V | None:
        """What there is of this key; None for nothing. Raises what `ask` raises."""
        if (answer := self._waiting.get(key)) is None:
            answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        # others may wait for the same
        return await asyncio.shield(answer)

    async def _run(self) -> None:
        count = 0
        while self._waiting:
            if count > 1:
                # where several come at a time, more of them are about to
                await asyncio.sleep(GATHER)
            asked = {key: self._waiting.pop(key) for key in list(self._waiting)[:AT_ONCE]}
            count = len(asked)
            asking = asyncio.ensure_future(self._ask(list(asked)))
            await asyncio.wait({asking})
            for key, answer in asked.items():
                if (error := asking.exception()) is None:
                    answer.set_result(asking.result().get(key))
                else:
                    answer.set_exception(error)
                    # whoever asked may have left
                    answer.exception()
