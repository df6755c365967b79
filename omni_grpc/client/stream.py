# generated from async_stream.py by tools/gen_sync_client.py; do not edit
"""The event stream of one job, for the synchronous client."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import grpc

from omni_grpc.client._sync import cancel_reason, sleep
from omni_grpc.client.channel import CANCEL_TIMEOUT, UNARY_TIMEOUT, Deadline
from omni_grpc.client.connection import Connection
from omni_grpc.client.failure import from_call
from omni_grpc.client.result import MediaResult
from omni_grpc.client.tracing import trace_id_of
from omni_grpc.client.watch import ENDED_EARLY, WatchState
from omni_grpc.types.errors import DeadlineExceeded, OmniError
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.v1.job_pb2 import Job
from omni_grpc.v1.options_pb2 import ARTIFACT_DELIVERY_REFERENCE


class JobStream(Iterator[JobEvent]):
    """The events of one job, each once and in order, even if the connection is lost in between.

    The stream of a generation ends as its job does: after `failed` or `cancelled` it raises the matching error. Leaving
    its `with` block early cancels the job. The stream of a watched job neither raises that error nor cancels.
    """

    def __init__(
        self, connection: Connection, call: Any, watch: WatchState, deadline: Deadline, *, owner: bool
    ) -> None:
        self._connection = connection
        self._call = call
        self._watch = watch
        self._deadline = deadline
        self._owner = owner
        self._first: JobEvent | None = None
        self._events = self._follow()

    @property
    def job_id(self) -> str:
        return self._watch.job_id

    @property
    def trace_id(self) -> str:
        """The trace that the server has put the job in, in 32 hex digits; empty where it traces nothing, and before the
        first event.
        """
        return self._watch.trace_id

    @property
    def after_seq(self) -> int:
        """The seq of the last event that was seen, after which another watcher would resume."""
        return self._watch.after_seq

    @property
    def error(self) -> OmniError | None:
        """Why the job has no result; None if it succeeded or has not ended."""
        return self._watch.error()

    def open(self) -> None:
        """Waits for the first event. A refusal is raised here, and afterwards `job_id` is known."""
        self._first = next(self._events)
        self._watch.trace_id = trace_id_of(self._call.initial_metadata())

    def __next__(self) -> JobEvent:
        if (first := self._first) is not None:
            self._first = None
            return first
        return next(self._events)

    def __enter__(self) -> JobStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if self._owner and self._watch.last is None:
            self._cancel_and_wait(error)

    def close(self) -> None:
        """Stops following the job without cancelling it. The server cancels the job of a generation once its disconnect
        grace period is over.
        """
        self._events.close()
        self._call.cancel()

    def cancel(self, reason: str = "") -> Job:
        """Asks the server to stop the job. Returns at once; the `cancelled` event tells when it has stopped."""
        return self._connection.cancel_job(self.job_id, reason, UNARY_TIMEOUT)

    def result(self) -> MediaResult:
        """Follows the job to its end and downloads missing output bytes. Raises the error that ended the job."""
        for _ in self:
            pass
        if (error := self._watch.error()) is not None:
            raise error
        for partial in self._watch.missing():
            self._connection.download(partial.artifact.artifact_id, self._deadline, partial)
        return self._watch.result()

    def _follow(self) -> Generator[JobEvent, None, None]:
        while True:
            try:
                for message in self._call:
                    if self._watch.accept(message.event):
                        yield message.event
                ended = ENDED_EARLY
            except grpc.RpcError as error:
                ended = from_call(error, self._connection.address)
            if self._watch.last is not None:
                break
            sleep(self._deadline.within(self._watch.lost(ended)))
            self._call = self._connection.open_watch(self._watch.request(), self._deadline)
        if self._owner and (failed := self._watch.error()) is not None:
            raise failed

    def _cancel_and_wait(self, error: BaseException | None) -> None:
        """Cancels the job because its stream was left with `error`, and waits until it has stopped."""
        try:
            self._connection.cancel_job(self.job_id, cancel_reason(error), CANCEL_TIMEOUT)
            # running out of time here is no error: the server has accepted the cancellation
            with contextlib.suppress(DeadlineExceeded):
                for _ in watch_job(self._connection, self.job_id, self.after_seq, Deadline(CANCEL_TIMEOUT)):
                    pass
        except OmniError as failure:
            if error is None:
                raise
            error.add_note(f"job {self.job_id} could not be cancelled: {failure}")


def watch_job(connection: Connection, job_id: str, after_seq: int, deadline: Deadline) -> JobStream:
    """The events of an existing job with a seq greater than `after_seq`."""
    watch = WatchState(connection.reconnect, ARTIFACT_DELIVERY_REFERENCE, job_id=job_id, after_seq=after_seq)
    return JobStream(connection, connection.open_watch(watch.request(), deadline), watch, deadline, owner=False)
