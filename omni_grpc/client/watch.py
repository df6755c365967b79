"""The state of one job's event stream. Does no I/O: the synchronous and the asyncio stream both drive it."""

from __future__ import annotations

import dataclasses

from omni_grpc import wire
from omni_grpc.client.channel import Reconnect
from omni_grpc.client.failure import CallFailure
from omni_grpc.client.partial_artifact import PartialArtifact
from omni_grpc.client.result import RESULTS, MediaResult
from omni_grpc.types.errors import Code, Failure, InternalError, OmniError, OperationCancelled, Unavailable
from omni_grpc.types.events import Completed
from omni_grpc.types.requested import Requested
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.v1.job_pb2 import WatchJobRequest
from omni_grpc.v1.media_pb2 import Artifact
from omni_grpc.v1.options_pb2 import ArtifactDelivery

TERMINAL = frozenset({"completed", "failed", "cancelled"})

ENDED_EARLY = CallFailure(
    Failure(code=Code.UNAVAILABLE, reason="STREAM_ENDED", message="the stream ended before the job did"),
    from_server=False,
)


class WatchState:
    """The position in one job's event stream, and the output bytes received with it.

    `last` is the event that ended the job, None until it arrives. `job_id` may be empty: the first event sets it.
    `asked` is what the job was made of, None where the client does not know.
    """

    def __init__(
        self,
        reconnect: Reconnect,
        delivery: ArtifactDelivery,
        *,
        job_id: str = "",
        after_seq: int = 0,
        asked: Requested | None = None,
    ) -> None:
        self.job_id = job_id
        self.after_seq = after_seq
        self.last: JobEvent | None = None
        self.trace_id = ""
        self._asked = asked
        self._reconnect = reconnect
        self._delivery = delivery
        self._connected = False
        self._attempt = 0
        self._rewind = 0
        self._files: dict[str, PartialArtifact] = {}

    def accept(self, event: JobEvent) -> bool:
        """Takes the next message. True if it is an event that the caller has not seen, not a chunk or a heartbeat."""
        self.job_id = event.job_id
        self._connected = True
        self._attempt = 0
        kind = event.WhichOneof("event")
        if kind == "artifact_chunk":
            self._add_chunk(event)
            return False
        if kind in TERMINAL:
            self.last = event
        if event.seq <= self.after_seq:
            return False
        self.after_seq = event.seq
        if kind == "artifact_ready":
            self.partial(event.artifact_ready.artifact)
        return True

    def request(self) -> WatchJobRequest:
        """Asks for the events after the last one that was seen."""
        after_seq = self.after_seq - self._rewind
        return WatchJobRequest(job_id=self.job_id, after_seq=after_seq, delivery=self._delivery)

    def lost(self, ended: CallFailure) -> float:
        """Returns how many seconds to wait before watching again, after a call that ended before the job did.

        Raises the failure if watching again is pointless (the server refused the call, the deadline passed, the job is
        unknown), and Unavailable (STREAM_LOST) if too many attempts failed in a row.
        """
        failure = ended.failure
        if not self._connected and ended is ENDED_EARLY and self.after_seq and not self._rewind:
            # no event follows this one, so it is the job's last: ask for it again, to learn how the job ended
            self._rewind = 1
            return 0.0
        if not self._connected:
            raise failure.error()
        if failure.code is Code.NOT_FOUND:
            message = (
                f"the connection was lost, and the server no longer knows job {self.job_id} because it has restarted"
            )
            raise Unavailable(f"{message}; send the request again", reason="JOB_LOST", metadata=self._position)
        if not ended.lost or self._attempt >= self._reconnect.attempts:
            raise self._final_failure(ended).error()
        self._attempt += 1
        return max(self._reconnect.delay(self._attempt - 1), failure.retry_after or 0.0)

    def error(self) -> OmniError | None:
        """Why the job has no result; None if it succeeded or has not ended."""
        if self.last is None or self.last.HasField("completed"):
            return None
        where = {"job_id": self.job_id}
        if self.last.HasField("failed"):
            failure = wire.from_status(self.last.failed.status)
            return dataclasses.replace(failure, metadata={**failure.metadata, **where}).error()
        stopped = self.last.cancelled
        message = f"job {self.job_id} was cancelled after {stopped.completed_steps} steps: {stopped.reason}"
        return OperationCancelled(message, reason="JOB_CANCELLED", metadata=where)

    def partial(self, artifact: Artifact) -> PartialArtifact:
        """The bytes of an artifact received so far."""
        return self._files.setdefault(artifact.artifact_id, PartialArtifact(artifact))

    def missing(self) -> list[PartialArtifact]:
        """The outputs of a job that succeeded whose bytes are incomplete."""
        return [output for output in self._outputs() if not output.complete]

    def result(self) -> MediaResult:
        """The result of a job that succeeded. Raises InternalError (ARTIFACT_CORRUPT) for damaged bytes."""
        assert self.last is not None
        done = wire.read_event(self.last)
        assert isinstance(done, Completed)
        return RESULTS[type(done.effective.output_format)](
            job_id=self.job_id,
            files=tuple(output.data() for output in self._outputs()),
            artifacts=done.artifacts,
            effective=done.effective,
            warnings=done.warnings,
            stats=done.stats,
            asked=self._asked,
            trace_id=self.trace_id,
        )

    @property
    def _position(self) -> dict[str, str]:
        return {"job_id": self.job_id, "after_seq": str(self.after_seq)}

    def _outputs(self) -> list[PartialArtifact]:
        return [self.partial(artifact) for artifact in self.last.completed.artifacts] if self.last else []

    def _add_chunk(self, event: JobEvent) -> None:
        chunk = event.artifact_chunk
        if chunk.artifact_id not in self._files:
            message = f"bytes of artifact {chunk.artifact_id} arrived before the artifact was announced"
            raise InternalError(message, reason="PROTOCOL_ERROR", metadata=self._position)
        self._files[chunk.artifact_id].add(chunk)

    def _final_failure(self, ended: CallFailure) -> Failure:
        failure = dataclasses.replace(ended.failure, metadata={**ended.failure.metadata, **self._position})
        if ended.timed_out:
            message = f"the deadline of the call passed after event {self.after_seq} of job {self.job_id}"
            return dataclasses.replace(failure, message=message)
        if ended.lost:
            tried = f"lost the stream and could not reconnect in {self._attempt} attempts"
            again = f"watch_job({self.job_id!r}, after_seq={self.after_seq})"
            message = f"{tried}: {failure.message}; the job may still be running, resume with {again}"
            return dataclasses.replace(failure, code=Code.UNAVAILABLE, reason="STREAM_LOST", message=message)
        return failure
