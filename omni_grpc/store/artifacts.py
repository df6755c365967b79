"""Outputs of running and finished jobs: their bytes, and how much each tenant keeps."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, AsyncIterator, Collection

from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.records import ArtifactRow, Cause
from omni_grpc.store.seam import Blobs, FileRows, MissingBlob, StoreError
from omni_grpc.store.tally import Tally
from omni_grpc.types.errors import NotFound
from omni_grpc.types.results import Artifact

logger = logging.getLogger(__name__)


class Artifacts:
    """Outputs by id. Each belongs to the tenant of its job, and is the blob of its id."""

    def __init__(self, files: FileRows, blobs: Blobs, forgotten: Forgotten) -> None:
        self._files = files
        self._blobs = blobs
        self._forgotten = forgotten
        self._held = Tally()

    async def count(self) -> None:
        """Learns from the store who keeps how much."""
        self._held = Tally(await self._files.artifact_bytes())

    @property
    def size_bytes(self) -> int:
        return self._held.total

    @property
    def tenants(self) -> list[str]:
        """Those who keep any."""
        return list(self._held)

    def artifact_bytes(self, tenant: str) -> int:
        """The size of one tenant's outputs."""
        return self._held[tenant]

    async def put(self, artifact: Artifact, pieces: AsyncIterable[bytes], *, tenant: str) -> None:
        """Keeps the bytes of an output. There is such an output once its job's log says so."""
        await self._blobs.put(artifact.artifact_id, pieces)
        self._held.add(tenant, artifact.size_bytes)

    async def find(self, artifact_id: str, tenant: str | None = None) -> ArtifactRow:
        """Raises NotFound (ARTIFACT_NOT_FOUND) for an unknown id, one that is no longer kept, or with `tenant`, one of
        another tenant.
        """
        row = await self._files.artifact(artifact_id)
        if row is None or tenant not in (None, row.tenant):
            await self._forgotten.look_up(artifact_id, self._files)
            raise self._not_found(artifact_id, tenant)
        return row

    async def read(self, artifact_id: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Its bytes from `start` until before `end`. Raises NotFound like `find`."""
        try:
            async for piece in self._blobs.read(artifact_id, start, end):
                yield piece
        except MissingBlob:
            raise self._not_found(artifact_id, None) from None

    async def data(self, artifact_id: str) -> bytes:
        """All of its bytes. Raises NotFound like `find`."""
        return b"".join([piece async for piece in self.read(artifact_id)])

    async def signed_url(self, artifact: Artifact, seconds: float) -> str | None:
        """An address at which anybody can get its bytes for so long; None where they are kept without addresses."""
        return await self._blobs.signed_url(artifact.artifact_id, seconds, mime_type=artifact.mime_type)

    async def delete(self, artifact_id: str, cause: Cause = Cause.DELETED) -> None:
        """Raises NotFound like `find`."""
        row = await self.find(artifact_id)
        if await self._files.delete_artifact(artifact_id, cause):
            self.gone(row.tenant, artifact_id, row.size_bytes, cause)
        await delete_blobs(self._blobs, [artifact_id])

    async def discard(self, artifacts: Collection[Artifact], *, tenant: str) -> None:
        """Deletes outputs that no log tells of."""
        self._held.add(tenant, -sum(artifact.size_bytes for artifact in artifacts))
        await delete_blobs(self._blobs, [artifact.artifact_id for artifact in artifacts])

    def gone(self, tenant: str, artifact_id: str, size: int, cause: Cause) -> None:
        """An output is not kept any more."""
        self._held.add(tenant, -size)
        self._forgotten.add(artifact_id, cause, tenant=tenant)

    def _not_found(self, artifact_id: str, tenant: str | None) -> NotFound:
        return self._forgotten.not_found(artifact_id, reason="ARTIFACT_NOT_FOUND", tenant=tenant)


async def delete_blobs(blobs: Blobs, names: Collection[str]) -> None:
    """Deletes bytes that no row names any more: that is done, whatever becomes of them."""
    try:
        await blobs.delete(names)
    except StoreError as error:
        logger.warning("%d files that nobody needs stay until the next sweep: %s", len(names), error)
