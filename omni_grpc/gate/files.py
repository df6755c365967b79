"""The bytes of outputs and of uploaded inputs."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from omni_grpc.engine import Job
from omni_grpc.fleet import Fleet
from omni_grpc.gate.addresses import Addresses
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.pages import PageRequest
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.refusals import Refusals, refused
from omni_grpc.gate.stored import Stored, available, read
from omni_grpc.store.assets import PROFILE
from omni_grpc.store.records import Asset, Position
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import DeadlineExceeded, FailedPrecondition, NotFound, OutOfRange
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
class Found:
    """A file that can be downloaded, with its times in Unix seconds; `expire_time` None: it stays as its job does.
    `about`: what the audit log says of it.
    """

    artifact: Artifact
    create_time: float
    expire_time: float | None
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)


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

    def __init__(self, fleet: Fleet, stored: Stored, quotas: Quotas, audit: Audit, addresses: Addresses) -> None:
        self._fleet = fleet
        self._addresses = addresses
        self._audit = audit
        self._stored = stored
        self._quotas = quotas

    async def find(self, caller: Caller, artifact_id: str) -> Found:
        """An output, or for an admin a file of a profile."""
        with self._audit.refusals(caller, "DownloadArtifact", artifact_id=artifact_id):
            return await self._find(caller, artifact_id)

    async def _find(self, caller: Caller, artifact_id: str) -> Found:
        if artifact_id.startswith(PROFILE):
            return await self._of_profile(caller, artifact_id)
        caller.require(Scope.READ, Scope.GENERATE, Scope.ADMIN)
        job, artifact = await self._stored.artifact(caller, artifact_id)
        return Found(
            artifact=artifact,
            create_time=job.outputs[artifact],
            expire_time=job.record.expire_time,
            about={"job_id": job.id, "model": job.request.model},
        )

    async def _of_profile(self, caller: Caller, name: str) -> Found:
        caller.require(Scope.ADMIN)
        with available():
            asset = await self._fleet.assets.use(name, caller.sees)
        artifact = Artifact(
            artifact_id=asset.id,
            job_id="",
            index=0,
            mime_type=asset.mime_type,
            size_bytes=asset.size_bytes,
            sha256=asset.sha256,
            width=0,
            height=0,
            seed=0,
        )
        return Found(artifact=artifact, create_time=asset.create_time, expire_time=asset.expire_time)

    async def chunks(
        self, caller: Caller, artifact_id: str, start: int = 0, max_bytes: int | None = None
    ) -> AsyncGenerator[Chunk]:
        """Bytes of an output from `start` on: close it (aclosing) when nobody wants the rest. Raises OutOfRange beyond
        its end, NotFound once it is gone.
        """
        with self._audit.action(caller, "DownloadArtifact", artifact_id=artifact_id) as line:
            found = await self._find(caller, artifact_id)
            artifact = found.artifact
            size = artifact.size_bytes
            if start > size:
                raise OutOfRange(
                    f"offset is {start}, but artifact {artifact.artifact_id} has {size} bytes",
                    reason="OFFSET_OUT_OF_RANGE",
                    metadata={"size_bytes": str(size)},
                )
            end = size if max_bytes is None else min(size, start + max_bytes)
            line |= {**found.about, "size_bytes": end - start}
        pieces = self._fleet.artifacts.read(artifact_id, start, end)
        async with aclosing(read(pieces)) as readable:
            async for piece in readable:
                for at in range(0, len(piece), CHUNK_BYTES):
                    data = piece[at : at + CHUNK_BYTES]
                    yield Chunk(artifact_id, start, data, start + len(data) == size)
                    start += len(data)

    async def signed_url(self, artifact: Artifact) -> str:
        """An address at which anybody can get the bytes of an output for a while: of the store, or else of the HTTP
        port.
        """
        if not self._fleet.storage.blobs.signs:
            return self._addresses.url(artifact.artifact_id)
        with available():
            url = await self._fleet.artifacts.signed_url(artifact, self._fleet.config.store.signed_url_seconds)
        assert url is not None, "asked of a store without addresses"
        return url

    async def address(self, caller: Caller, artifact_id: str) -> str:
        """The signed path of an output at the HTTP port, for who may read it."""
        with self._audit.refusals(caller, "DownloadArtifact", artifact_id=artifact_id):
            caller.require(Scope.READ, Scope.GENERATE, Scope.ADMIN)
            await self._stored.artifact(caller, artifact_id)
        return self._addresses.path(artifact_id)

    async def by_address(self, artifact_id: str, expires: str, signature: str, peer: str) -> Caller:
        """The caller that a signed address makes of whoever has it: a reader of its output's tenant. Raises
        PermissionDenied (ADDRESS_INVALID, ADDRESS_EXPIRED) and NotFound.
        """
        nobody = Caller(subject="signed address", scopes=frozenset(), peer=peer)
        with self._audit.refusals(nobody, "DownloadArtifact", artifact_id=artifact_id), available():
            self._addresses.check(artifact_id, expires, signature)
            tenant = (await self._fleet.artifacts.find(artifact_id)).tenant
        return dataclasses.replace(nobody, tenant=tenant, scopes=frozenset({Scope.READ}))

    async def page(
        self, caller: Caller, job_id: str, asked: PageRequest
    ) -> tuple[Sequence[tuple[Job, Artifact, Position]], str]:
        """A page of outputs, of one job or of all of the caller's, each with its place, and the token of the next."""
        with self._audit.refusals(caller, "ListArtifacts", job_id=job_id):
            caller.require(Scope.READ, Scope.ADMIN)
            if job_id:
                await self._stored.job(caller, job_id)
            kept = await self._stored.artifacts(caller, job_id=job_id, after=asked.after, limit=asked.limit + 1)
            return asked.cut(kept, lambda entry: entry[2])

    async def delete(self, caller: Caller, name: str) -> None:
        """Deletes an upload or an output."""
        with self._audit.action(caller, "DeleteArtifact", artifact_id=name) as line, available():
            caller.require(*([Scope.ADMIN] if name.startswith(PROFILE) else [Scope.GENERATE, Scope.ADMIN]))
            if self._fleet.needs_asset(name):
                await self._fleet.assets.use(name, caller.sees)
                message = f"{name} is the file of a LoRA adapter that is loaded; unload the adapter first"
                raise FailedPrecondition(message, reason="ASSET_IN_USE", metadata={"name": name})
            try:
                asset = await self._fleet.assets.delete(name, caller.sees)
            except NotFound:
                _, artifact = await self._stored.artifact(caller, name)
                line["size_bytes"] = artifact.size_bytes
                await self._fleet.artifacts.delete(artifact.artifact_id)
            else:
                line["size_bytes"] = asset.size_bytes

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
        with available():
            # what has expired does not count
            await self._fleet.assets.sweep()
        self._quotas.check_upload(caller.tenant, header.size_bytes)
        upload = Upload(pieces, header)
        with available():
            async with self._fleet.assets.reserved(header.size_bytes, tenant=caller.tenant):
                return await self._fleet.assets.put(
                    upload.received(),
                    header.mime_type,
                    sha256=upload.digest.hexdigest,
                    check=upload.check,
                    tenant=caller.tenant,
                )

    def _check(self, header: UploadHeader) -> None:
        refusals = Refusals()
        refusals.required("header.mime_type", header.mime_type)
        refusals.number("header.size_bytes", header.size_bytes, 1, self._fleet.config.limits.max_input_bytes)
        if len(header.sha256) not in (0, 32):
            refusals.refuse("header.sha256", f"has {len(header.sha256)} bytes; send the 32 raw bytes, not hex")
        refusals.check()


class Upload:
    """The bytes of an upload as they arrive, which have to be what its header says."""

    def __init__(self, pieces: AsyncIterator[bytes], header: UploadHeader) -> None:
        self._pieces = pieces
        self._header = header
        self._size = 0
        self.digest = hashlib.sha256()

    async def received(self) -> AsyncGenerator[bytes]:
        """Raises InvalidArgument as soon as they are too many, and at the end if they are too few."""
        size = self._header.size_bytes
        while (piece := await within_silence(self._pieces)) is not None:
            if len(piece) > MAX_CHUNK_BYTES:
                raise refused("data", f"has {len(piece)} bytes; the maximum per message is {MAX_CHUNK_BYTES}")
            self._size += len(piece)
            self.digest.update(piece)
            if self._size > size:
                raise refused("header.size_bytes", f"is {size}, but at least {self._size} bytes arrived")
            yield piece
        if self._size < size:
            raise refused("header.size_bytes", f"is {size}, but {self._size} bytes arrived")

    def check(self) -> None:
        """Raises InvalidArgument where the bytes have another hash."""
        given, found = self._header.sha256, self.digest.digest()
        if given and found != given:
            raise refused("header.sha256", f"is {given.hex()}, but the SHA-256 of the bytes is {found.hex()}")


async def within_silence(stream: AsyncIterator[T]) -> T | None:
    """The next message or piece of an upload, None at its end. Raises DeadlineExceeded (UPLOAD_SILENT)."""
    try:
        async with asyncio.timeout(UPLOAD_SILENCE):
            return await anext(stream, None)
    except TimeoutError:
        message = f"no data arrived for {UPLOAD_SILENCE:g} s; start the upload again"
        raise DeadlineExceeded(message, reason="UPLOAD_SILENT") from None
