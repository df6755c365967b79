"""The stream of one job, for the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from omni_grpc.client.channel import CANCEL_TIMEOUT, Deadline
from omni_grpc.client.failure import from_call
from omni_grpc.client.result import MediaResult
from omni_grpc.client.watch import ENDED_EARLY, WatchState
from omni_grpc.types.errors import DeadlineExceeded, OmniError
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.v1.job_pb2 import Job

if TYPE_CHECKING:
    from omni_grpc.client.async_client import AsyncClient


class AsyncJobStream(AsyncIterator[JobEvent]):
    """`JobStream` for asyncio: the same events, the same errors, `async with` and `async for`."""

    def __init__(self, client: AsyncClient, call: Any, watch: WatchState, deadline: Deadline, *, owner: bool) -> None:
        self._client = client
        self._call = call
        self._watch = watch
        self._deadline = deadline
        self._owner = owner
        self._source = self._follow()
        self._first: JobEvent | None = None

    @property
    def job_id(self) -> str:
        return self._watch.job_id

    @property
    def after_seq(self) -> int:
        """The last event that was seen: where another watcher would go on."""
        return self._watch.after_seq

    @property
    def error(self) -> OmniError | None:
        """Why the job has no result; None where it succeeded, and as long as it has not ended."""
        return self._watch.error()

    async def open(self) -> None:
        """Waits for the first event, so that a refusal is raised here and `job_id` is known afterwards."""
        self._first = await anext(self._source)

    async def __anext__(self) -> JobEvent:
        if (first := self._first) is not None:
            self._first = None
            return first
        return await anext(self._source)

    async def __aenter__(self) -> AsyncJobStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
        if self._owner and self._watch.last is None:
            await self._leave(error)

    async def close(self) -> None:
        """Lets go of the stream. The job goes on, that of a generation until its disconnect grace is over."""
        await self._source.aclose()
        self._call.cancel()

    async def cancel(self, reason: str = "") -> Job:
        """Asks the server to stop the job. Returns at once; the `cancelled` event tells when it has stopped."""
        return await self._client.cancel_job(self.job_id, reason)

    async def result(self) -> MediaResult:
        """Follows the job to its end and fetches what is missing. Raises the error that ended the job."""
        async for _ in self:
            pass
        if (error := self._watch.error()) is not None:
            raise error
        for parts in self._watch.missing():
            await self._client.fetch(parts, self._deadline)
        return self._watch.result()

    async def _follow(self) -> AsyncGenerator[JobEvent, None]:
        while True:
            try:
                async for message in self._call:
                    if self._watch.accept(message.event):
                        yield message.event
                ended = ENDED_EARLY
            except grpc.RpcError as error:
                ended = from_call(error, self._client.address)
            if self._watch.last is not None:
                break
            await asyncio.sleep(self._deadline.within(self._watch.lost(ended)))
            self._call = self._client.open_watch(self._watch.request(), self._deadline)
        if self._owner and (failed := self._watch.error()) is not None:
            raise failed

    async def _leave(self, error: BaseException | None) -> None:
        task_cancelled = isinstance(error, asyncio.CancelledError)
        reason = "the client's task was cancelled" if task_cancelled else "the client left the stream"
        try:
            await self._client.cancel_job(self.job_id, reason, timeout=CANCEL_TIMEOUT)
            # a deadline that passes here is no error: the server has been told
            with contextlib.suppress(DeadlineExceeded):
                async for _ in self._client.watch_job(self.job_id, self.after_seq, timeout=CANCEL_TIMEOUT):
                    pass
        except OmniError as failure:
            if error is None:
                raise
            error.add_note(f"job {self.job_id} could not be cancelled: {failure}")
