"""Output files of running and finished jobs, in memory."""

from __future__ import annotations

from omni_grpc.engine.forgotten import Forgotten
from omni_grpc.engine.tally import Tally
from omni_grpc.store.records import Cause
from omni_grpc.types.results import Artifact


class Artifacts:
    """Artifacts by id. `size_bytes` is their total size. Each belongs to the tenant of its job."""

    def __init__(self, forgotten: Forgotten | None = None) -> None:
        self._forgotten = Forgotten() if forgotten is None else forgotten
        self._files: dict[str, tuple[Artifact, bytes]] = {}
        self._owners: dict[str, str] = {}
        self._held = Tally()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def artifact_bytes(self, tenant: str) -> int:
        """The size of one tenant's artifacts."""
        return self._held[tenant]

    def put(self, artifact: Artifact, data: bytes, *, tenant: str = "") -> None:
        """`tenant`: that of the artifact's job."""
        self._files[artifact.artifact_id] = (artifact, data)
        self._owners[artifact.artifact_id] = tenant
        self._held.add(tenant, len(data))
        self.size_bytes += len(data)

    def get(self, artifact_id: str, tenant: str | None = None) -> tuple[Artifact, bytes]:
        """Raises NotFound (ARTIFACT_NOT_FOUND) for an unknown id, one that is no longer kept, or with `tenant`, one of
        another tenant.
        """
        if artifact_id not in self._files or tenant not in (None, self._owners[artifact_id]):
            raise self._forgotten.not_found(artifact_id, reason="ARTIFACT_NOT_FOUND", tenant=tenant)
        return self._files[artifact_id]

    def delete(self, artifact_id: str, cause: Cause = Cause.DELETED) -> None:
        """Raises NotFound like `get`."""
        _, data = self.get(artifact_id)
        del self._files[artifact_id]
        tenant = self._owners.pop(artifact_id)
        self._held.add(tenant, -len(data))
        self._forgotten.add(artifact_id, cause, tenant=tenant)
        self.size_bytes -= len(data)
