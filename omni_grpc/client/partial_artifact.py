"""The bytes of one artifact as they arrive."""

from __future__ import annotations

import hashlib

from omni_grpc.types.errors import InternalError
from omni_grpc.v1.media_pb2 import Artifact, ArtifactChunk


class PartialArtifact:
    """Assembles the chunks of an artifact. Offsets are checked as chunks arrive, the SHA-256 at the end.

    Raises InternalError (ARTIFACT_CORRUPT) if the bytes are not the ones that the server announced.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._data = bytearray()

    @property
    def offset(self) -> int:
        """Bytes received so far, which is where a download continues."""
        return len(self._data)

    @property
    def complete(self) -> bool:
        return self.offset == self.artifact.size_bytes

    def add(self, chunk: ArtifactChunk) -> None:
        if chunk.offset != self.offset:
            raise self._corrupt(f"a chunk starts at byte {chunk.offset}, expected {self.offset}")
        self._data += chunk.data
        if self.offset > self.artifact.size_bytes:
            raise self._corrupt(f"{self.offset} bytes arrived, but {self.artifact.size_bytes} were announced")

    def check_resumed(self, artifact: Artifact) -> None:
        """Checks that a resumed download is of the same artifact as the bytes received so far."""
        if (artifact.artifact_id, artifact.sha256) != (self.artifact.artifact_id, self.artifact.sha256):
            raise self._corrupt("it is a different artifact than the one whose first bytes arrived")

    def data(self) -> bytes:
        """All bytes, checked."""
        if not self.complete:
            raise self._corrupt(f"{self.offset} of {self.artifact.size_bytes} bytes arrived")
        data = bytes(self._data)
        digest = hashlib.sha256(data).digest()
        if digest != self.artifact.sha256:
            raise self._corrupt(f"its SHA-256 is {digest.hex()}, but {self.artifact.sha256.hex()} was announced")
        return data

    def _corrupt(self, what: str) -> InternalError:
        return InternalError(
            f"artifact {self.artifact.artifact_id}: {what}; download it again",
            reason="ARTIFACT_CORRUPT",
            metadata={"artifact_id": self.artifact.artifact_id},
        )
