"""The sync client behind the asyncio client's face: calls run in threads, so that one test serves both clients."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from omni_grpc.client import Client, JobStream
from omni_grpc.v1.event_pb2 import JobEvent


def whole(events: Sequence[JobEvent]) -> bool:
    """Nothing is lost and nothing comes twice: each gap is as wide as what is said to be left out."""
    seqs = [0, *(event.seq for event in events)]
    gaps = [after - before - 1 for before, after in itertools.pairwise(seqs)]
    return gaps == [event.coalesced for event in events]


class ThreadedClient:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.client = Client(*args, **kwargs)

    async def __aenter__(self) -> ThreadedClient:
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.client.close()

    async def stream(self, *args: Any, **kwargs: Any) -> ThreadedStream:
        return ThreadedStream(await asyncio.to_thread(self.client.stream, *args, **kwargs))

    def watch_job(self, *args: Any, **kwargs: Any) -> ThreadedStream:
        return ThreadedStream(self.client.watch_job(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return functools.partial(asyncio.to_thread, getattr(self.client, name))


class ThreadedStream:
    def __init__(self, stream: JobStream) -> None:
        self.stream = stream

    @property
    def job_id(self) -> str:
        return self.stream.job_id

    @property
    def error(self) -> Exception | None:
        return self.stream.error

    def __aiter__(self) -> ThreadedStream:
        return self

    async def __anext__(self) -> JobEvent:
        event = await asyncio.to_thread(next, self.stream, None)
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> ThreadedStream:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.stream.__exit__, *error)

    async def close(self) -> None:
        await asyncio.to_thread(self.stream.close)

    async def cancel(self, reason: str = "") -> Any:
        return await asyncio.to_thread(self.stream.cancel, reason)

    async def result(self) -> Any:
        return await asyncio.to_thread(self.stream.result)
