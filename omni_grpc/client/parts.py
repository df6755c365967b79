"""The bytes of one artifact, as they arrive."""

from __future__ import annotations

import hashlib

from omni_grpc.types.errors import InternalError
from omni_grpc.v1.media_pb2 import Artifact, ArtifactChunk


class Parts:
    """Puts chunks together and checks them: their order while they come, the SHA-256 at the end.

    Raises InternalError (ARTIFACT_CORRUPT) for bytes that are not those which the server announced.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._data = bytearray()

    @property
    def offset(self) -> int:
        """Bytes that are here: where a download goes on."""
        return len(self._data)

    @property
    def complete(self) -> bool:
        return self.offset == self.artifact.size_bytes

    def add(self, chunk: ArtifactChunk) -> None:
        if chunk.offset != self.offset:
            raise self._corrupt(f"a chunk starts at byte {chunk.offset}, expected {self.offset}")
        self._data += chunk.data
        if self.offset > self.artifact.size_bytes:
            raise self._corrupt(f"{self.offset} bytes came, announced were {self.artifact.size_bytes}")

    def resumed(self, artifact: Artifact) -> None:
        """Compares what a download that goes on says about the artifact with what was said before."""
        if (artifact.artifact_id, artifact.sha256) != (self.artifact.artifact_id, self.artifact.sha256):
            raise self._corrupt("it is another artifact than the one whose first bytes are here")

    def data(self) -> bytes:
        """All bytes, checked."""
        if not self.complete:
            raise self._corrupt(f"{self.offset} of {self.artifact.size_bytes} bytes came")
        data = bytes(self._data)
        digest = hashlib.sha256(data).digest()
        if digest != self.artifact.sha256:
            raise self._corrupt(f"its SHA-256 is {digest.hex()}, announced was {self.artifact.sha256.hex()}")
        return data

    def _corrupt(self, what: str) -> InternalError:
        return InternalError(
            f"artifact {self.artifact.artifact_id}: {what}; download it again",
            reason="ARTIFACT_CORRUPT",
            metadata={"artifact_id": self.artifact.artifact_id},
        )
