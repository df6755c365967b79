"""What every implementation of `seam.Blobs` does. A subclass gives a fixture `blobs`, opened."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from omni_grpc.store.seam import Blobs, MissingBlob

MIB = 1 << 20
STALL_SECONDS = 0.02
SIZES = (0, 1, MIB - 1, MIB, MIB + 1, 17 * MIB)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def pieces(data: bytes, size: int = 300_001) -> AsyncIterator[bytes]:
    """The data in pieces, the last but one of them empty."""
    for at in range(0, len(data), size):
        if at + size >= len(data):
            yield b""
        yield data[at : at + size]


async def until_told(first: bytes, ready: asyncio.Event) -> AsyncIterator[bytes]:
    """One piece, and then no other one for ever."""
    yield first
    ready.set()
    await asyncio.Event().wait()


async def read(blobs: Blobs, name: str, start: int = 0, end: int | None = None) -> bytes:
    found = [piece async for piece in blobs.read(name, start, end)]
    assert all(0 < len(piece) <= MIB for piece in found)
    assert all(isinstance(piece, bytes) for piece in found)
    return b"".join(found)


async def missing(blobs: Blobs, name: str) -> bool:
    try:
        await read(blobs, name)
    except MissingBlob:
        return True
    return False


async def names(blobs: Blobs, prefix: str = "", before: float | None = None) -> list[str]:
    return sorted([name async for name in blobs.names(prefix, time.time() + 60 if before is None else before)])


Clock = Callable[[], float]


async def stall_of(work: Callable[[], Coroutine[Any, Any, object]], clock: Clock = time.perf_counter) -> float:
    """The longest time for which work keeps the loop from all else, beyond that of a loop that only waits: other
    processes of this machine hold up both. Of up to five rounds the best, since what blocks the loop does so in each.
    """
    stalls: list[float] = []
    while len(stalls) < 5 and not (stalls and min(stalls) < STALL_SECONDS):
        idle = await _longest_stall(asyncio.sleep(0.1), clock)
        stalls.append(await _longest_stall(work(), clock) - idle)
    return min(stalls)


async def _longest_stall(work: Coroutine[Any, Any, object], clock: Clock) -> float:
    task = asyncio.ensure_future(work)
    longest = 0.0
    while not task.done():
        before = clock()
        await asyncio.sleep(0.001)
        longest = max(longest, clock() - before - 0.001)
    await task
    return longest


class BlobConformance:
    clock = 0.0
    """How much later than it was put a blob may be taken to be, in seconds."""

    @pytest.mark.parametrize("size", SIZES)
    async def test_what_is_put_is_read(self, blobs: Blobs, size: int) -> None:
        data = noise(size)
        assert await blobs.put("out-1.png", pieces(data)) == size
        assert hashlib.sha256(await read(blobs, "out-1.png")).digest() == hashlib.sha256(data).digest()

    @pytest.mark.parametrize("size", [1, 2 * MIB, 17 * MIB])
    async def test_pieces_may_be_large_and_small(self, blobs: Blobs, size: int) -> None:
        data = noise(20_000) + noise(size) + noise(3)

        async def mixed() -> AsyncIterator[bytes]:
            for at in range(20_000):
                yield data[at : at + 1]
            yield data[20_000 : 20_000 + size]
            yield data[20_000 + size :]

        assert await blobs.put("mixed", mixed()) == len(data)
        assert await read(blobs, "mixed") == data

    async def test_a_range_is_its_bytes(self, blobs: Blobs) -> None:
        data = noise(3 * MIB + 17)
        await blobs.put("a", pieces(data))
        end = len(data)
        for start, stop in (
            *((0, None), (0, 1), (1, 1), (5, 2), (MIB - 1, MIB + 1), (7, 3 * MIB + 1), (end - 1, None), (end, None)),
            *((end + 1, None), (end + 1, end + 9), (0, end + 99), (end - 3, end + 99), (0, 0)),
        ):
            assert await read(blobs, "a", start, stop) == data[start:stop], (start, stop)
        await blobs.put("empty", pieces(b""))
        assert await read(blobs, "empty", 0, 4) == b""
        assert await read(blobs, "empty", 4) == b""

    async def test_what_there_is_not_is_missing(self, blobs: Blobs) -> None:
        await blobs.put("a", pieces(b"1"))
        for name in ("b", "a/b", "", "../a", "/a", "a\0", "a b", "x" * 5000):
            for span in ((0, None), (3, 5)):
                with pytest.raises(MissingBlob):
                    await read(blobs, name, *span)

    async def test_one_of_the_same_name_is_replaced(self, blobs: Blobs) -> None:
        await blobs.put("a", pieces(noise(2 * MIB)))
        await blobs.put("a", pieces(b"new"))
        assert await read(blobs, "a") == b"new"
        assert await names(blobs) == ["a"]

    async def test_of_puts_at_the_same_time_one_is_kept_whole(self, blobs: Blobs) -> None:
        contents = [noise(2 * MIB + seed, seed) for seed in range(4)]
        sizes = await asyncio.gather(*(blobs.put("a", pieces(data)) for data in contents))
        assert sizes == [len(data) for data in contents]
        assert await read(blobs, "a") in contents
        assert await names(blobs) == ["a"]

    @pytest.mark.parametrize("size", [10, 20 * MIB])
    async def test_a_put_that_is_cancelled_leaves_nothing(self, blobs: Blobs, size: int) -> None:
        ready = asyncio.Event()
        put = asyncio.create_task(blobs.put("a", until_told(noise(size), ready)))
        await ready.wait()
        assert await names(blobs) == []
        assert await missing(blobs, "a")
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await names(blobs) == []
        assert await missing(blobs, "a")
        await self.nothing_is_left()

    async def test_a_put_that_is_cancelled_at_any_moment_leaves_nothing(self, blobs: Blobs) -> None:
        started = time.monotonic()
        await blobs.put("a", pieces(noise(MIB)))
        usual = time.monotonic() - started
        await blobs.delete(["a"])
        for moment in range(12):
            put = asyncio.create_task(blobs.put("a", pieces(noise(MIB))))
            await asyncio.sleep(usual * moment / 10)
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
            assert await names(blobs) == ([] if put.cancelled() else ["a"])
            await blobs.delete(["a"])
        await self.nothing_is_left()

    @pytest.mark.parametrize("size", [10, 20 * MIB])
    async def test_a_put_whose_source_fails_leaves_nothing(self, blobs: Blobs, size: int) -> None:
        class SourceError(Exception):
            pass

        async def failing() -> AsyncIterator[bytes]:
            yield noise(size)
            raise SourceError

        with pytest.raises(SourceError):
            await blobs.put("a", failing())
        assert await names(blobs) == []
        assert await missing(blobs, "a")
        await self.nothing_is_left()

    async def test_what_is_deleted_is_gone(self, blobs: Blobs) -> None:
        await asyncio.gather(*(blobs.put(f"a/{n}", pieces(b"x")) for n in range(5)))
        await blobs.delete(["a/1", "a/3", "nothing", "../a/2", ""])
        assert await names(blobs) == ["a/0", "a/2", "a/4"]
        assert await missing(blobs, "a/1")
        await blobs.delete([])
        await blobs.delete(["a/0", "a/2", "a/4"])
        assert await names(blobs) == []

    async def test_names_by_prefix(self, blobs: Blobs) -> None:
        every = ["a", "a.png", "a/1", "a/2", "ab/1", "b", "in-7/mask_1", "in-7/mask_2", "in-8/mask_1"]
        await asyncio.gather(*(blobs.put(name, pieces(b"x")) for name in every))
        assert await names(blobs) == every
        for prefix in ("a", "a/", "a/1", "in-7/", "in-7/mask", "in-", "c", "A"):
            assert await names(blobs, prefix) == [name for name in every if name.startswith(prefix)], prefix

    async def test_names_by_time(self, blobs: Blobs) -> None:
        before = time.time()
        await blobs.put("old", pieces(b"x"))
        await asyncio.sleep(self.clock + 0.01)
        middle = time.time()
        await blobs.put("new", pieces(b"x"))
        assert await names(blobs, before=before) == []
        assert await names(blobs, before=middle) == ["old"]
        await asyncio.sleep(self.clock + 0.01)
        assert await names(blobs, before=time.time()) == ["new", "old"]

    async def test_many_are_written_and_read_at_the_same_time(self, blobs: Blobs) -> None:
        contents = {f"n{seed}": noise(200_000, seed) for seed in range(40)}
        await asyncio.gather(*(blobs.put(name, pieces(data)) for name, data in contents.items()))
        found = await asyncio.gather(*(read(blobs, name) for name in contents))
        assert found == list(contents.values())

    async def test_a_reader_may_stop_early(self, blobs: Blobs) -> None:
        await blobs.put("a", pieces(noise(5 * MIB)))
        for _ in range(5):
            reader = blobs.read("a")
            await anext(reader)
            await reader.aclose()  # type: ignore[attr-defined]
        assert len(await read(blobs, "a")) == 5 * MIB

    async def nothing_is_left(self) -> None:
        """What an implementation may leave beside its blobs, it has not left."""
