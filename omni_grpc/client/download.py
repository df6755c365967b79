"""The state of one download. Does no I/O: the synchronous and the asyncio client both drive it."""

from __future__ import annotations

import dataclasses

from omni_grpc.client.channel import Reconnect
from omni_grpc.client.failure import CallFailure
from omni_grpc.client.partial_artifact import PartialArtifact
from omni_grpc.types.errors import InternalError
from omni_grpc.v1.artifact_pb2 import DownloadArtifactRequest, DownloadArtifactResponse


class DownloadState:
    """The bytes of one artifact so far. `partial` holds those that were received another way before."""

    def __init__(self, reconnect: Reconnect, artifact_id: str, partial: PartialArtifact | None = None) -> None:
        self._reconnect = reconnect
        self._artifact_id = artifact_id
        self._partial = partial
        self._connected = False
        self._attempt = 0

    @property
    def offset(self) -> int:
        """Bytes received so far."""
        return self._partial.offset if self._partial else 0

    def request(self) -> DownloadArtifactRequest:
        """Asks for the bytes that are still missing."""
        return DownloadArtifactRequest(artifact_id=self._artifact_id, offset=self.offset)

    def accept(self, message: DownloadArtifactResponse) -> None:
        """Takes the next message of the call. Raises InternalError for one that does not fit the bytes so far."""
        self._connected = True
        self._attempt = 0
        if message.HasField("chunk"):
            self._expect().add(message.chunk)
        elif self._partial is None:
            self._partial = PartialArtifact(message.metadata)
        else:
            self._partial.check_resumed(message.metadata)

    def finished(self) -> PartialArtifact:
        """The artifact, once the call has ended without an error."""
        return self._expect()

    def lost(self, ended: CallFailure) -> float:
        """Returns how many seconds to wait before the next call, after one that failed.

        Raises the failure if the server refused the call or too many attempts failed in a row. A call that fails before
        its first message is repeated once only, since the server may not exist; gRPC itself repeats a call only if no
        headers were received.
        """
        attempts = self._reconnect.attempts if self._connected else min(1, self._reconnect.attempts)
        if not ended.lost or self._attempt >= attempts:
            message = f"artifact {self._artifact_id}, at byte {self.offset}: {ended.failure.message}"
            raise (dataclasses.replace(ended.failure, message=message) if self._connected else ended.failure).error()
        self._attempt += 1
        return self._reconnect.delay(self._attempt - 1)

    def _expect(self) -> PartialArtifact:
        if self._partial is None:
            message = f"the download of artifact {self._artifact_id} did not start with its metadata"
            raise InternalError(message, reason="PROTOCOL_ERROR", metadata={"artifact_id": self._artifact_id})
        return self._partial
