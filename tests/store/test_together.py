"""Questions that are asked together, and transactions in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from omni_grpc.store.sql.together import Together


class Asked:
    def __init__(self) -> None:
        self.rounds: list[list[str]] = []
        self.error: Exception | None = None

    async def ask(self, keys: Sequence[str]) -> dict[str, str]:
        self.rounds.append(list(keys))
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return {key: key.upper() for key in keys if key != "none"}


async def test_what_comes_meanwhile_is_asked_next() -> None:
    asked = Asked()
    together: Together[str, str] = Together(asked.ask)
    first = asyncio.create_task(together.of("a"))
    await asyncio.sleep(0.002)
    assert await asyncio.gather(*map(together.of, ("a", "b", "b", "none"))) == ["A", "B", "B", None]
    assert await first == "A"
    # the second question about "a" was not answered by a look that began before it
    assert asked.rounds == [["a"], ["a", "b", "none"]]


async def test_an_error_is_everybodys_and_the_next_question_is_asked_anew() -> None:
    asked = Asked()
    together: Together[str, str] = Together(asked.ask)
    asked.error = ValueError("away")
    found = await asyncio.gather(together.of("a"), together.of("b"), return_exceptions=True)
    assert [str(error) for error in found] == ["away", "away"]
    asked.error = None
    assert await together.of("a") == "A"


async def test_who_leaves_takes_nothing_from_others() -> None:
    asked = Asked()
    together: Together[str, str] = Together(asked.ask)
    leaving, staying = (asyncio.create_task(together.of("a")) for _ in range(2))
    await asyncio.sleep(0.002)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await staying == "A"
