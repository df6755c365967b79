"""Files over plain HTTP: uploads, and outputs by ranges of bytes, since browsers stream no uploads over an rpc and a
`<video>` sends no token.
"""

from __future__ import annotations

import dataclasses
import mimetypes
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from omni_grpc.gate import Gate, UploadHeader
from omni_grpc.gate.addresses import PATH
from omni_grpc.gate.files import MAX_CHUNK_BYTES
from omni_grpc.gate.refusals import refused
from omni_grpc.server.calls import PACKAGE, Calls
from omni_grpc.server.messages import asset_message
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import OutOfRange
from omni_grpc.types.results import Artifact
from omni_grpc.web.codecs import as_json
from omni_grpc.web.connection import Connection
from omni_grpc.web.handled import Handled

SERVICE = PACKAGE + "ArtifactService/"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
"""What has more digits is no range of a file, and would be no number to Python."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Bytes from `start` until before `end`."""

    start: int
    end: int


class Files:
    """Uploads, downloads and addresses of outputs."""

    def __init__(self, gate: Gate, calls: Calls) -> None:
        self._gate = gate
        self._calls = calls

    def routes(self) -> Iterator[Route]:
        upload = Handled(self._calls, SERVICE + "UploadAsset", self._upload)
        yield Route(PATH + "assets", upload, methods=["POST"])
        address = Handled(self._calls, SERVICE + "DownloadArtifact", self._address)
        yield Route(PATH + "{artifact_id}/address", address, methods=["GET"])
        download = Handled(self._calls, SERVICE + "DownloadArtifact", self._download, identify=self._reader)
        yield Route(PATH + "{artifact_id}", download, methods=["GET", "HEAD"])
        delete = Handled(self._calls, SERVICE + "DeleteArtifact", self._delete)
        yield Route(PATH + "{artifact_id}", delete, methods=["DELETE"])

    async def _upload(self, request: Request, caller: Caller) -> Response:
        length = request.headers.get("content-length")
        if length is None or not length.isdecimal():
            raise refused("header.size_bytes", "is unknown: send the header Content-Length")
        header = UploadHeader(mime_type=request.headers.get("content-type", ""), size_bytes=int(length))
        async with aclosing(_pieces(request)) as pieces:
            asset = await self._gate.files.upload(caller, header, pieces)
        return Response(as_json(asset_message(asset)), media_type="application/json")

    async def _reader(self, request: Request) -> Caller:
        connection = Connection.of(request.scope)
        if "signature" not in request.query_params:
            return await connection.caller(self._calls, SERVICE + "DownloadArtifact")
        given = request.query_params
        return await self._gate.files.by_address(
            request.path_params["artifact_id"], given.get("expires", ""), given["signature"], connection.peer
        )

    async def _address(self, request: Request, caller: Caller) -> Response:
        url = await self._gate.files.address(caller, request.path_params["artifact_id"])
        return JSONResponse({"url": url}, headers={"cache-control": "no-store"})

    async def _delete(self, request: Request, caller: Caller) -> Response:
        await self._gate.files.delete(caller, request.path_params["artifact_id"])
        return Response(status_code=204)

    async def _download(self, request: Request, caller: Caller) -> Response:
        return await self.sent(request, caller, request.path_params["artifact_id"])

    async def sent(self, request: Request, caller: Caller, artifact_id: str) -> Response:
        """An output, or the part of it that the request is for."""
        artifact = (await self._gate.files.find(caller, artifact_id)).artifact
        headers = _headers(artifact)
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        span = _span(request, artifact, headers["etag"])
        if span is not None:
            headers["content-range"] = f"bytes {span.start}-{span.end - 1}/{artifact.size_bytes}"
        sent = span or Span(0, artifact.size_bytes)
        headers["content-length"] = str(sent.end - sent.start)
        status = 200 if span is None else 206
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers, media_type=artifact.mime_type)
        return StreamingResponse(
            self._bytes(caller, artifact, sent), status, headers=headers, media_type=artifact.mime_type
        )

    async def _bytes(self, caller: Caller, artifact: Artifact, span: Span) -> AsyncGenerator[bytes]:
        chunks = self._gate.files.chunks(caller, artifact.artifact_id, span.start, span.end - span.start)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk.data


def _headers(artifact: Artifact) -> dict[str, str]:
    suffix = mimetypes.guess_extension(artifact.mime_type) or ""
    return {
        "accept-ranges": "bytes",
        "etag": f'"{artifact.sha256}"',
        "cache-control": "private, max-age=3600, immutable",
        "content-disposition": f'inline; filename="{artifact.artifact_id}{suffix}"',
    }


def _span(request: Request, artifact: Artifact, etag: str) -> Span | None:
    """The bytes that a request is for, None for all of them: also where it asks for several ranges, which HTTP allows.
    Raises OutOfRange for those that are not there.
    """
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or request.headers.get("if-range", etag) != etag or found.group() == "bytes=-":
        return None
    first, last = found.groups()
    size = artifact.size_bytes
    if not first:
        span = Span(max(0, size - int(last)), size)
    else:
        span = Span(int(first), min(size, int(last) + 1) if last else size)
        if last and int(last) < int(first):
            return None
    if span.start >= span.end:
        raise OutOfRange(
            f"the range {found.group()} is beyond the {size} bytes of {artifact.artifact_id}",
            reason="OFFSET_OUT_OF_RANGE",
            metadata={"size_bytes": str(size)},
        )
    return span


async def _pieces(request: Request) -> AsyncGenerator[bytes]:
    async for piece in request.stream():
        for at in range(0, len(piece), MAX_CHUNK_BYTES):
            yield piece[at : at + MAX_CHUNK_BYTES]
