"""The bytes of outputs and of uploaded inputs."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

from omni_grpc.engine import Engine, Job
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.pages import PageRequest, page
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.refusals import Refusals, refused
from omni_grpc.gate.stored import Stored
from omni_grpc.store.records import Asset
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import DeadlineExceeded, NotFound, OutOfRange
from omni_grpc.types.results import Artifact

T = TypeVar("T")

CHUNK_BYTES = 512 * 1024
"""Bytes of an output in one piece: half of what the API promises at most, where loopback throughput is flat."""
MAX_CHUNK_BYTES = 1 << 20
"""Most bytes in one piece of an upload."""
UPLOAD_SILENCE = 60.0
"""Seconds without a byte after which an upload is given up, since it holds room that others need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an output."""

    artifact_id: str
    offset: int
    data: bytes
    last: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UploadHeader:
    """What an upload says of itself. `sha256`: 32 raw bytes, or none."""

    mime_type: str
    size_bytes: int
    sha256: bytes = b""


class FileGate:
    """Every function raises PermissionDenied for a missing scope, and NotFound (ARTIFACT_NOT_FOUND) for an output that
    the caller has not.
    """

    def __init__(self, engine: Engine, stored: Stored, quotas: Quotas, audit: Audit) -> None:
        self._engine = engine
        self._audit = audit
        self._stored = stored
        self._quotas = quotas

    def find(self, caller: Caller, artifact_id: str) -> tuple[Job, Artifact]:
        with self._audit.refusals(caller, "DownloadArtifact", artifact_id=artifact_id):
            return self._find(caller, artifact_id)

    def _find(self, caller: Caller, artifact_id: str) -> tuple[Job, Artifact]:
        caller.require(Scope.READ, Scope.GENERATE, Scope.ADMIN)
        job, artifact, _ = self._stored.artifact(caller, artifact_id)
        return job, artifact

    def chunks(self, caller: Caller, artifact_id: str, start: int = 0, max_bytes: int | None = None) -> Iterator[Chunk]:
        """Bytes of an output from `start` on. Raises OutOfRange beyond its end, NotFound once it is gone."""
        with self._audit.action(caller, "DownloadArtifact", artifact_id=artifact_id) as line:
            job, artifact = self._find(caller, artifact_id)
            size = artifact.size_bytes
            if start > size:
                raise OutOfRange(
                    f"offset is {start}, but artifact {artifact.artifact_id} has {size} bytes",
                    reason="OFFSET_OUT_OF_RANGE",
                    metadata={"size_bytes": str(size)},
                )
            end = size if max_bytes is None else min(size, start + max_bytes)
            line |= {"job_id": job.id, "model": job.request.model, "size_bytes": end - start}
            return self._chunks(artifact_id, start, end)

    def _chunks(self, artifact_id: str, start: int, end: int) -> Iterator[Chunk]:
        _, data = self._engine.artifacts.get(artifact_id)
        end = min(end, len(data))
        for offset in range(start, end, CHUNK_BYTES):
            piece = data[offset : min(offset + CHUNK_BYTES, end)]
            yield Chunk(artifact_id, offset, piece, offset + len(piece) == len(data))

    def page(self, caller: Caller, job_id: str, asked: PageRequest) -> tuple[list[tuple[Job, Artifact, float]], str]:
        """A page of outputs, of one job or of all of the caller's, with the time of each, and the token of the next."""
        with self._audit.refusals(caller, "ListArtifacts", job_id=job_id):
            caller.require(Scope.READ, Scope.ADMIN)
            kept = self._stored.artifacts(caller, self._stored.job(caller, job_id) if job_id else None)
            return page(kept, lambda entry: (entry[2], entry[1].artifact_id), asked)

    def delete(self, caller: Caller, name: str) -> None:
        """Deletes an upload or an output."""
        with self._audit.action(caller, "DeleteArtifact", artifact_id=name) as line:
            caller.require(Scope.GENERATE, Scope.ADMIN)
            try:
                asset, _ = self._stored.asset(caller, name)
            except NotFound:
                _, artifact, _ = self._stored.artifact(caller, name)
                line["size_bytes"] = artifact.size_bytes
                self._engine.artifacts.delete(artifact.artifact_id)
            else:
                line["size_bytes"] = asset.size_bytes
                self._engine.assets.delete(asset.id)

    async def upload(self, caller: Caller, header: UploadHeader, pieces: AsyncIterator[bytes]) -> Asset:
        """Stores an upload. Raises InvalidArgument where the bytes are not what the header says, ResourceExhausted
        where there is no room, DeadlineExceeded after a silence.
        """
        with self._audit.action(caller, "UploadAsset", size_bytes=header.size_bytes) as line:
            asset = await self._upload(caller, header, pieces)
            line["asset_id"] = asset.id
        return asset

    async def _upload(self, caller: Caller, header: UploadHeader, pieces: AsyncIterator[bytes]) -> Asset:
        caller.require(Scope.GENERATE)
        self._check(header)
        await self._quotas.refresh()
        self._quotas.check_upload(caller.tenant, header.size_bytes)
        with self._engine.assets.reserved(header.size_bytes, tenant=caller.tenant):
            data, digest = await _receive(pieces, header.size_bytes)
        if header.sha256 and digest != header.sha256:
            raise refused("header.sha256", f"is {header.sha256.hex()}, but the SHA-256 of the bytes is {digest.hex()}")
        return self._engine.assets.put(data, header.mime_type, sha256=digest.hex(), tenant=caller.tenant)

    def _check(self, header: UploadHeader) -> None:
        refusals = Refusals()
        refusals.required("header.mime_type", header.mime_type)
        refusals.number("header.size_bytes", header.size_bytes, 1, self._engine.config.limits.max_input_bytes)
        if len(header.sha256) not in (0, 32):
            refusals.refuse("header.sha256", f"has {len(header.sha256)} bytes; send the 32 raw bytes, not hex")
        refusals.check()


async def _receive(pieces: AsyncIterator[bytes], size: int) -> tuple[bytes, bytes]:
    """The bytes of an upload and their SHA-256. Raises InvalidArgument if they are not `size` bytes."""
    data, digest = bytearray(), hashlib.sha256()
    while (piece := await within_silence(pieces)) is not None:
        if len(piece) > MAX_CHUNK_BYTES:
            raise refused("data", f"has {len(piece)} bytes; the maximum per message is {MAX_CHUNK_BYTES}")
        data += piece
        digest.update(piece)
        if len(data) > size:
            raise refused("header.size_bytes", f"is {size}, but at least {len(data)} bytes arrived")
    if len(data) < size:
        raise refused("header.size_bytes", f"is {size}, but {len(data)} bytes arrived")
    return bytes(data), digest.digest()


async def within_silence(stream: AsyncIterator[T]) -> T | None:
    """The next message or piece of an upload, None at its end. Raises DeadlineExceeded (UPLOAD_SILENT)."""
    try:
        async with asyncio.timeout(UPLOAD_SILENCE):
            return await anext(stream, None)
    except TimeoutError:
        message = f"no data arrived for {UPLOAD_SILENCE:g} s; start the upload again"
        raise DeadlineExceeded(message, reason="UPLOAD_SILENT") from None
