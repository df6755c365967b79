"""Sends requests to a server, follows each to its end, and notes what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from omni_grpc.cli.bench.serve.mix import Requests
from omni_grpc.cli.bench.serve.record import Record
from omni_grpc.cli.bench.serve.work import Work
from omni_grpc.client.async_connection import AsyncConnection
from omni_grpc.client.async_stream import AsyncJobStream
from omni_grpc.client.channel import Deadline, Retry
from omni_grpc.client.watch import WatchState
from omni_grpc.types.errors import OmniError
from omni_grpc.v1.generation_pb2 import (
    EditImageRequest,
    GenerateAudioRequest,
    GenerateImageRequest,
    GenerateVideoRequest,
)
from omni_grpc.v1.job_pb2 import CreateJobRequest, WatchJobRequest
from omni_grpc.v1.options_pb2 import ARTIFACT_DELIVERY_INLINE_CHUNKS


class LoadConnection(AsyncConnection):
    """A connection that counts how often the stream of a job was taken up again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.resumed: dict[str, int] = {}

    def open_watch(self, request: WatchJobRequest, deadline: Deadline) -> Any:
        self.resumed[request.job_id] = self.resumed.get(request.job_id, 0) + 1
        return super().open_watch(request, deadline)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """`timeout`: seconds that a request may take, with its retries; `retry`: how often it is sent again."""

    timeout: float
    retry: Retry


class Runner:
    """Runs requests. `records` grows as they are sent, so that what is there when a run is interrupted is not lost."""

    def __init__(self, connection: LoadConnection, requests: Requests, how: How) -> None:
        self._connection = connection
        self._requests = requests
        self._how = how
        self._clock = asyncio.get_running_loop().time
        self._began = 0.0
        self.records: list[Record] = []

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    @property
    def rows(self) -> int:
        """Sequences of this run's jobs in their last step."""
        return sum(record.rows for record in self.records if not record.outcome)

    async def run(self, work: Work, stop: asyncio.Event) -> None:
        """Returns when every request has ended. Where `stop` is set no more are sent, and the jobs of those that run
        are cancelled.
        """
        self._began = self._clock()
        loop = self._open(work, stop) if work.concurrency is None else self._closed(work, stop)
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            async for request in loop:
                task = group.create_task(request)
                running.add(task)
                task.add_done_callback(running.discard)
            stopped = group.create_task(_until(stop))
            while running and not stop.is_set():
                await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, stopped):
                task.cancel()

    async def _open(self, work: Work, stop: asyncio.Event) -> AsyncIterator[Coroutine[Any, Any, None]]:
        for number, (at, name) in enumerate(zip(work.times, work.names, strict=False)):
            # nothing to wait for is no reason to go on: what runs must be heard, too
            if await _set_within(stop, max(0.0, at - self.now)):
                return
            yield self._one(number, name, at)

    async def _closed(self, work: Work, stop: asyncio.Event) -> AsyncIterator[Coroutine[Any, Any, None]]:
        numbered = enumerate(work.names)
        for _ in range(work.concurrency or 0):
            yield self._one_after_the_other(work, numbered, stop)

    async def _one_after_the_other(self, work: Work, numbered: Iterator[tuple[int, str]], stop: asyncio.Event) -> None:
        for number, name in numbered:
            if stop.is_set() or (work.seconds is not None and self.now >= work.seconds):
                return
            await self._one(number, name, self.now)

    async def _one(self, number: int, name: str, at: float) -> None:
        record = Record(number=number, klass=name, scheduled=at)
        self.records.append(record)
        try:
            await self._tried(record, self._requests.make(number, name))
        except asyncio.CancelledError:
            record.interrupt(self.now)
            raise
        finally:
            record.resumes = self._connection.resumed.pop(record.job_id, 0)

    async def _tried(self, record: Record, request: Message) -> None:
        deadline = Deadline(self._how.timeout)
        record.sent = self.now
        for attempt in itertools.count():
            try:
                await self._follow(record, request, deadline)
                return
            except OmniError as error:
                # a job that was made is not made again: what ended it is what is measured
                pause = None if record.job_id else self._how.retry.pause(error.failure, attempt, deadline)
                if pause is None:
                    record.fail(error.failure, self.now)
                    return
                record.retries += 1
                await asyncio.sleep(pause)

    async def _follow(self, record: Record, request: Message, deadline: Deadline) -> None:
        watch = WatchState(self._connection.reconnect, ARTIFACT_DELIVERY_INLINE_CHUNKS)
        call = self._call(request, deadline)
        stream = AsyncJobStream(self._connection, call, watch, deadline, owner=True)
        try:
            async for event in stream:
                record.see(event, self.now)
        except BaseException as error:
            # left early, a job is cancelled; a request that was refused has none
            await stream.close()
            if watch.last is None and (record.job_id or isinstance(error, asyncio.CancelledError)):
                await self._cancel(record, request, error)
            raise

    def _call(self, request: Any, deadline: Deadline) -> Any:
        generation = self._connection.generation
        rpcs: dict[type[Message], Any] = {
            GenerateImageRequest: generation.GenerateImage,
            EditImageRequest: generation.EditImage,
            GenerateVideoRequest: generation.GenerateVideo,
            GenerateAudioRequest: generation.GenerateAudio,
        }
        return rpcs[type(request)](request, timeout=deadline.remaining())

    async def _cancel(self, record: Record, request: Any, cause: BaseException) -> None:
        try:
            if not record.job_id:
                # its first event was still on the way: the same request_id gives the same job
                again = CreateJobRequest(**{_TASKS[type(request)]: request})
                record.job_id = (await self._connection.unary(self._connection.jobs.CreateJob, again, 5.0)).job.job_id
            await self._connection.cancel_job(record.job_id, "the load test has left the job", 5.0)
        except OmniError as error:
            cause.add_note(f"job {record.job_id or 'without an event'} could not be cancelled: {error}")


_TASKS: Mapping[type[Message], str] = {
    GenerateImageRequest: "generate_image",
    EditImageRequest: "edit_image",
    GenerateVideoRequest: "generate_video",
    GenerateAudioRequest: "generate_audio",
}
"""Request -> its field in CreateJobRequest."""


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


async def _set_within(stop: asyncio.Event, seconds: float) -> bool:
    """Waits for so many seconds, or until the event is set; whether it is."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()
