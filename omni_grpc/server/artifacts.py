"""ArtifactService: the bytes of outputs and of uploaded inputs, in chunks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from omni_grpc import wire
from omni_grpc.engine import Engine, Job
from omni_grpc.server.fields import Reader, refused
from omni_grpc.server.messages import Messages, stored_artifacts
from omni_grpc.server.pages import page
from omni_grpc.types.errors import DeadlineExceeded, NotFound, OutOfRange
from omni_grpc.types.results import Artifact
from omni_grpc.v1 import artifact_pb2, artifact_pb2_grpc

MAX_CHUNK_BYTES = 1 << 20
UPLOAD_SILENCE = 60.0
"""Seconds without a byte after which an upload is given up, since it holds room that others need."""


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    def __init__(self, engine: Engine, messages: Messages) -> None:
        self._engine = engine
        self._messages = messages

    async def DownloadArtifact(
        self, request: artifact_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncGenerator[artifact_pb2.DownloadArtifactResponse]:
        artifact = self._artifact(request.artifact_id)
        if request.offset > artifact.size_bytes:
            raise OutOfRange(
                f"offset is {request.offset}, but artifact {artifact.artifact_id} has {artifact.size_bytes} bytes",
                reason="OFFSET_OUT_OF_RANGE",
                metadata={"size_bytes": str(artifact.size_bytes)},
            )
        end = request.offset + request.max_bytes if request.HasField("max_bytes") else artifact.size_bytes
        job = self._engine.jobs.get(artifact.job_id)
        yield artifact_pb2.DownloadArtifactResponse(metadata=self._messages.artifact(job, artifact))
        for chunk in self._messages.chunks(artifact.artifact_id, request.offset, end):
            yield artifact_pb2.DownloadArtifactResponse(chunk=chunk)

    async def ListArtifacts(
        self, request: artifact_pb2.ListArtifactsRequest, context: Any
    ) -> artifact_pb2.ListArtifactsResponse:
        jobs = [self._engine.jobs.get(request.job_id)] if request.job_id else self._engine.jobs.newest()
        kept = [entry for job in jobs for entry in self._kept(job)]
        shown, token = page(kept, lambda entry: (entry[2], entry[1].artifact_id), request)
        return artifact_pb2.ListArtifactsResponse(
            artifacts=[self._messages.artifact(job, artifact) for job, artifact, _ in shown], next_page_token=token
        )

    async def DeleteArtifact(
        self, request: artifact_pb2.DeleteArtifactRequest, context: Any
    ) -> artifact_pb2.DeleteArtifactResponse:
        try:
            self._engine.assets.delete(request.artifact_id)
        except NotFound:
            self._engine.artifacts.delete(self._artifact(request.artifact_id).artifact_id)
        return artifact_pb2.DeleteArtifactResponse()

    async def UploadAsset(
        self, requests: AsyncIterator[artifact_pb2.UploadAssetRequest], context: Any
    ) -> artifact_pb2.UploadAssetResponse:
        header = self._header(await _next(requests))
        with self._engine.assets.reserved(header.size_bytes):
            data, digest = await _receive(requests, header.size_bytes)
        if header.sha256 and digest != header.sha256:
            raise refused("header.sha256", f"is {header.sha256.hex()}, but the SHA-256 of the bytes is {digest.hex()}")
        asset = self._engine.assets.put(data, header.mime_type, sha256=digest.hex())
        return wire.build(
            artifact_pb2.UploadAssetResponse,
            asset_id=asset.id,
            expire_time=asset.expire_time,
            size_bytes=asset.size_bytes,
            sha256=asset.sha256,
        )

    def _header(self, first: artifact_pb2.UploadAssetRequest | None) -> artifact_pb2.UploadHeader:
        if first is None or not first.HasField("header"):
            raise refused("header", "must be the first message")
        header, most = first.header, self._engine.config.limits.max_input_bytes
        reader = Reader()
        reader.required("header.mime_type", header.mime_type)
        reader.number("header.size_bytes", header.size_bytes, 1, most)
        if len(header.sha256) not in (0, 32):
            reader.refuse("header.sha256", f"has {len(header.sha256)} bytes; send the 32 raw bytes, not hex")
        reader.check()
        return header

    def _artifact(self, artifact_id: str) -> Artifact:
        if not artifact_id:
            raise refused("artifact_id", "is required")
        return self._engine.artifacts.get(artifact_id)[0]

    def _kept(self, job: Job) -> Iterator[tuple[Job, Artifact, float]]:
        """Outputs of a job whose bytes are still there, with the time at which they were stored."""
        for artifact, stored in stored_artifacts(job).items():
            try:
                self._engine.artifacts.get(artifact.artifact_id)
            except NotFound:
                continue
            yield job, artifact, stored


async def _receive(requests: AsyncIterator[artifact_pb2.UploadAssetRequest], size: int) -> tuple[bytes, bytes]:
    """The bytes of an upload and their SHA-256. Raises InvalidArgument if they are not `size` bytes."""
    data, digest = bytearray(), hashlib.sha256()
    while (message := await _next(requests)) is not None:
        if not message.HasField("data"):
            raise refused("header", "was sent again; after the first message send only bytes")
        if len(message.data) > MAX_CHUNK_BYTES:
            raise refused("data", f"has {len(message.data)} bytes; the maximum per message is {MAX_CHUNK_BYTES}")
        data += message.data
        digest.update(message.data)
        if len(data) > size:
            raise refused("header.size_bytes", f"is {size}, but at least {len(data)} bytes arrived")
    if len(data) < size:
        raise refused("header.size_bytes", f"is {size}, but {len(data)} bytes arrived")
    return bytes(data), digest.digest()


async def _next(requests: AsyncIterator[artifact_pb2.UploadAssetRequest]) -> artifact_pb2.UploadAssetRequest | None:
    """The next message of an upload, None at its end."""
    try:
        async with asyncio.timeout(UPLOAD_SILENCE):
            return await anext(requests, None)
    except TimeoutError:
        message = f"no data arrived for {UPLOAD_SILENCE:g} s; start the upload again"
        raise DeadlineExceeded(message, reason="UPLOAD_SILENT") from None
