"""The stream of one job, for the sync client."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Iterator
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
    from omni_grpc.client.client import Client


class JobStream(Iterator[JobEvent]):
    """The events of one job, each once and in order, whatever happens to the connection.

    The stream of a generation ends as its job does: after `failed` or `cancelled` it raises the matching error. Leaving
    its `with` block early cancels the job. The stream of a watched job ends quietly and leaves the job alone.
    """

    def __init__(self, client: Client, call: Any, watch: WatchState, deadline: Deadline, *, owner: bool) -> None:
        self._client = client
        self._call = call
        self._watch = watch
        self._deadline = deadline
        self._owner = owner
        self._source = self._follow()
        self._events: Iterator[JobEvent] = self._source

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

    def open(self) -> None:
        """Waits for the first event, so that a refusal is raised here and `job_id` is known afterwards."""
        self._events = itertools.chain((next(self._source),), self._source)

    def __next__(self) -> JobEvent:
        return next(self._events)

    def __enter__(self) -> JobStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if self._owner and self._watch.last is None:
            self._leave(error)

    def close(self) -> None:
        """Lets go of the stream. The job goes on, that of a generation until its disconnect grace is over."""
        self._source.close()
        self._call.cancel()

    def cancel(self, reason: str = "") -> Job:
        """Asks the server to stop the job. Returns at once; the `cancelled` event tells when it has stopped."""
        return self._client.cancel_job(self.job_id, reason)

    def result(self) -> MediaResult:
        """Follows the job to its end and fetches what is missing. Raises the error that ended the job."""
        for _ in self:
            pass
        if (error := self._watch.error()) is not None:
            raise error
        for parts in self._watch.missing():
            self._client.fetch(parts, self._deadline)
        return self._watch.result()

    def _follow(self) -> Generator[JobEvent, None, None]:
        while True:
            try:
                for message in self._call:
                    if self._watch.accept(message.event):
                        yield message.event
                ended = ENDED_EARLY
            except grpc.RpcError as error:
                ended = from_call(error, self._client.address)
            if self._watch.last is not None:
                break
            time.sleep(self._deadline.within(self._watch.lost(ended)))
            self._call = self._client.open_watch(self._watch.request(), self._deadline)
        if self._owner and (failed := self._watch.error()) is not None:
            raise failed

    def _leave(self, error: BaseException | None) -> None:
        reason = "interrupted by the user" if isinstance(error, KeyboardInterrupt) else "the client left the stream"
        try:
            self._client.cancel_job(self.job_id, reason, timeout=CANCEL_TIMEOUT)
            # a deadline that passes here is no error: the server has been told
            with contextlib.suppress(DeadlineExceeded):
                for _ in self._client.watch_job(self.job_id, self.after_seq, timeout=CANCEL_TIMEOUT):
                    pass
        except OmniError as failure:
            if error is None:
                raise
            error.add_note(f"job {self.job_id} could not be cancelled: {failure}")
