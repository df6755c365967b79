"""The produced files of finished and running jobs, in memory."""

from __future__ import annotations

from omni_grpc.types.errors import NotFound
from omni_grpc.types.results import Artifact


class Artifacts:
    """Artifacts by id. `size_bytes` is what all of them take."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Artifact, bytes]] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def put(self, artifact: Artifact, data: bytes) -> None:
        self._files[artifact.artifact_id] = (artifact, data)
        self.size_bytes += len(data)

    def get(self, artifact_id: str) -> tuple[Artifact, bytes]:
        """Raises NotFound (ARTIFACT_NOT_FOUND) for an artifact that never was or that is no longer kept."""
        try:
            return self._files[artifact_id]
        except KeyError:
            message = f"there is no artifact {artifact_id!r}, or it has expired with its job"
            raise NotFound(message, reason="ARTIFACT_NOT_FOUND") from None

    def delete(self, artifact_id: str) -> None:
        """Raises NotFound like `get`."""
        _, data = self.get(artifact_id)
        del self._files[artifact_id]
        self.size_bytes -= len(data)
