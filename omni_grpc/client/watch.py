"""What a client knows of one job's stream, without input or output: the sync and the asyncio stream drive it alike."""

from __future__ import annotations

import dataclasses

from omni_grpc.client import events
from omni_grpc.client.channel import Reconnect
from omni_grpc.client.failure import CallFailure, from_status
from omni_grpc.client.parts import Parts
from omni_grpc.client.result import RESULTS, MediaResult
from omni_grpc.types.errors import Code, Failure, InternalError, OmniError, OperationCancelled, Unavailable
from omni_grpc.types.events import Completed
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.v1.job_pb2 import WatchJobRequest
from omni_grpc.v1.media_pb2 import Artifact
from omni_grpc.v1.options_pb2 import ArtifactDelivery

TERMINAL = frozenset({"completed", "failed", "cancelled"})

ENDED_EARLY = CallFailure(
    Failure(code=Code.UNAVAILABLE, reason="STREAM_ENDED", message="the stream ended before the job did"),
    from_server=False,
)


class Watch:
    """Position in the stream of one job, and the bytes that came along. `last` is its last event, None until it comes.

    `job_id` may be empty: the first event tells it.
    """

    def __init__(
        self, reconnect: Reconnect, delivery: ArtifactDelivery, *, job_id: str = "", after_seq: int = 0
    ) -> None:
        self.job_id = job_id
        self.after_seq = after_seq
        self.last: JobEvent | None = None
        self._reconnect = reconnect
        self._delivery = delivery
        self._connected = False
        self._attempt = 0
        self._back = 0
        self._files: dict[str, Parts] = {}

    def accept(self, event: JobEvent) -> bool:
        """Notes a message. True where it is an event that the caller has not seen; chunks and heartbeats are none."""
        self.job_id = event.job_id
        self._connected = True
        self._attempt = 0
        kind = event.WhichOneof("event")
        if kind == "artifact_chunk":
            self._chunked(event)
            return False
        if kind in TERMINAL:
            self.last = event
        if event.seq <= self.after_seq:
            return False
        self.after_seq = event.seq
        if kind == "artifact_ready":
            self.parts(event.artifact_ready.artifact)
        return True

    def request(self) -> WatchJobRequest:
        """Asks for what comes after the last event that was seen."""
        after_seq = self.after_seq - self._back
        return WatchJobRequest(job_id=self.job_id, after_seq=after_seq, delivery=self._delivery)

    def lost(self, ended: CallFailure) -> float:
        """The call ended and the job has not: seconds to wait before the job is watched again.

        Raises where watching again makes no sense (the call was refused, its deadline passed, the job is unknown), and
        Unavailable (STREAM_LOST) where it was tried often enough.
        """
        failure = ended.failure
        if not self._connected and ended is ENDED_EARLY and self.after_seq and not self._back:
            # nothing comes after this event, so it is the job's last: ask for it, to know how the job ended
            self._back = 1
            return 0.0
        if not self._connected:
            raise failure.error()
        if failure.code is Code.NOT_FOUND:
            message = f"the connection was lost, and the server no longer knows job {self.job_id}: it has restarted"
            raise Unavailable(f"{message}; send the request again", reason="JOB_LOST", metadata=self._position)
        if not ended.lost or self._attempt >= self._reconnect.attempts:
            raise self._given_up(ended).error()
        self._attempt += 1
        return max(self._reconnect.delay(self._attempt - 1), failure.retry_after or 0.0)

    def error(self) -> OmniError | None:
        """Why the job has no result; None where it succeeded or has not ended."""
        if self.last is None or self.last.HasField("completed"):
            return None
        where = {"job_id": self.job_id}
        if self.last.HasField("failed"):
            failure = from_status(self.last.failed.status)
            return dataclasses.replace(failure, metadata={**failure.metadata, **where}).error()
        stopped = self.last.cancelled
        message = f"job {self.job_id} was cancelled after {stopped.completed_steps} steps: {stopped.reason}"
        return OperationCancelled(message, reason="JOB_CANCELLED", metadata=where)

    def parts(self, artifact: Artifact) -> Parts:
        """What is here of an artifact's bytes."""
        return self._files.setdefault(artifact.artifact_id, Parts(artifact))

    def missing(self) -> list[Parts]:
        """Outputs of a job that succeeded, whose bytes are not all here."""
        return [parts for parts in self._outputs() if not parts.complete]

    def result(self) -> MediaResult:
        """The result of a job that succeeded. Raises InternalError (ARTIFACT_CORRUPT) for damaged bytes."""
        assert self.last is not None
        done = events.event(self.last)
        assert isinstance(done, Completed)
        return RESULTS[type(done.effective.output_format)](
            job_id=self.job_id,
            files=tuple(parts.data() for parts in self._outputs()),
            artifacts=done.artifacts,
            effective=done.effective,
            warnings=done.warnings,
            stats=done.stats,
        )

    @property
    def _position(self) -> dict[str, str]:
        return {"job_id": self.job_id, "after_seq": str(self.after_seq)}

    def _outputs(self) -> list[Parts]:
        return [self.parts(artifact) for artifact in self.last.completed.artifacts] if self.last else []

    def _chunked(self, event: JobEvent) -> None:
        chunk = event.artifact_chunk
        if chunk.artifact_id not in self._files:
            message = f"bytes of artifact {chunk.artifact_id} came before the artifact itself"
            raise InternalError(message, reason="PROTOCOL_ERROR", metadata=self._position)
        self._files[chunk.artifact_id].add(chunk)

    def _given_up(self, ended: CallFailure) -> Failure:
        failure = dataclasses.replace(ended.failure, metadata={**ended.failure.metadata, **self._position})
        if ended.timed_out:
            message = f"the deadline of the call passed at event {self.after_seq} of job {self.job_id}"
            return dataclasses.replace(failure, message=message)
        if ended.lost:
            tried = f"lost the stream and did not get it back in {self._attempt} attempts"
            again = f"watch_job({self.job_id!r}, after_seq={self.after_seq})"
            message = f"{tried}: {failure.message}; the job may still run: {again}"
            return dataclasses.replace(failure, code=Code.UNAVAILABLE, reason="STREAM_LOST", message=message)
        return failure
