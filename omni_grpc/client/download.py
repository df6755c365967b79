"""What a client knows of one download, without any input or output."""

from __future__ import annotations

import dataclasses

from omni_grpc.client.channel import Reconnect
from omni_grpc.client.failure import CallFailure
from omni_grpc.client.parts import Parts
from omni_grpc.types.errors import InternalError
from omni_grpc.v1.artifact_pb2 import DownloadArtifactRequest, DownloadArtifactResponse


class Download:
    """The bytes of one artifact so far; `parts` are those that came another way before."""

    def __init__(self, reconnect: Reconnect, artifact_id: str, parts: Parts | None = None) -> None:
        self._reconnect = reconnect
        self._artifact_id = artifact_id
        self._parts = parts
        self._connected = False
        self._attempt = 0

    def request(self) -> DownloadArtifactRequest:
        """Asks for the bytes that are not here yet."""
        return DownloadArtifactRequest(artifact_id=self._artifact_id, offset=self._parts.offset if self._parts else 0)

    def accept(self, message: DownloadArtifactResponse) -> None:
        self._connected = True
        self._attempt = 0
        if message.HasField("chunk"):
            self._expect().add(message.chunk)
        elif self._parts is None:
            self._parts = Parts(message.metadata)
        else:
            self._parts.resumed(message.metadata)

    def finished(self) -> Parts:
        """All the bytes, once the call has ended well."""
        return self._expect()

    def lost(self, ended: CallFailure) -> float:
        """The call was cut off: seconds to wait before the next. Raises what was refused, or failed too often.

        A call that ends before its first message may have been cut off there, or have found nobody: it is made once
        more, since gRPC itself does that only where not even headers came.
        """
        attempts = self._reconnect.attempts if self._connected else min(1, self._reconnect.attempts)
        if not ended.lost or self._attempt >= attempts:
            offset = self._parts.offset if self._parts else 0
            message = f"artifact {self._artifact_id}, at byte {offset}: {ended.failure.message}"
            raise (dataclasses.replace(ended.failure, message=message) if self._connected else ended.failure).error()
        self._attempt += 1
        return self._reconnect.delay(self._attempt - 1)

    def _expect(self) -> Parts:
        if self._parts is None:
            message = f"the download of artifact {self._artifact_id} began without its metadata"
            raise InternalError(message, reason="PROTOCOL_ERROR", metadata={"artifact_id": self._artifact_id})
        return self._parts
