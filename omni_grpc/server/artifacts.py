"""ArtifactService: the bytes of outputs and of uploaded inputs, in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from omni_grpc.gate import Gate, UploadHeader
from omni_grpc.gate.files import within_silence
from omni_grpc.gate.refusals import refused
from omni_grpc.server.messages import Messages, asset_message, chunk_message, found_message
from omni_grpc.server.pages import asked_page
from omni_grpc.types.caller import Caller
from omni_grpc.v1 import artifact_pb2, artifact_pb2_grpc


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    def __init__(self, gate: Gate, messages: Messages) -> None:
        self._gate = gate
        self._messages = messages

    async def DownloadArtifact(
        self, request: artifact_pb2.DownloadArtifactRequest, caller: Caller
    ) -> AsyncGenerator[artifact_pb2.DownloadArtifactResponse]:
        found = await self._gate.files.find(caller, request.artifact_id)
        most = request.max_bytes if request.HasField("max_bytes") else None
        async with aclosing(self._gate.files.chunks(caller, request.artifact_id, request.offset, most)) as chunks:
            first = await anext(chunks, None)
            yield artifact_pb2.DownloadArtifactResponse(metadata=found_message(found))
            if first is not None:
                yield artifact_pb2.DownloadArtifactResponse(chunk=chunk_message(first))
            async for chunk in chunks:
                yield artifact_pb2.DownloadArtifactResponse(chunk=chunk_message(chunk))

    async def ListArtifacts(
        self, request: artifact_pb2.ListArtifactsRequest, caller: Caller
    ) -> artifact_pb2.ListArtifactsResponse:
        shown, token = await self._gate.files.page(caller, request.job_id, asked_page(request))
        return artifact_pb2.ListArtifactsResponse(
            artifacts=[self._messages.artifact(job, artifact) for job, artifact, _ in shown], next_page_token=token
        )

    async def DeleteArtifact(
        self, request: artifact_pb2.DeleteArtifactRequest, caller: Caller
    ) -> artifact_pb2.DeleteArtifactResponse:
        await self._gate.files.delete(caller, request.artifact_id)
        return artifact_pb2.DeleteArtifactResponse()

    async def UploadAsset(
        self, requests: AsyncIterator[artifact_pb2.UploadAssetRequest], caller: Caller
    ) -> artifact_pb2.UploadAssetResponse:
        first = await within_silence(requests)
        if first is None or not first.HasField("header"):
            raise refused("header", "must be the first message")
        header = UploadHeader(
            mime_type=first.header.mime_type, size_bytes=first.header.size_bytes, sha256=first.header.sha256
        )
        return asset_message(await self._gate.files.upload(caller, header, _pieces(requests)))


async def _pieces(requests: AsyncIterator[artifact_pb2.UploadAssetRequest]) -> AsyncGenerator[bytes]:
    async for message in requests:
        if not message.HasField("data"):
            raise refused("header", "was sent again; after the first message send only bytes")
        yield message.data
