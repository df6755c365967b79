"""The media that a request brings along: where their bytes are. They are decoded before the engine sees the request,
by processes of their own.

Bytes come in the message, in a data: URL, or from an asset or an output that is stored here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from omni_grpc.engine import Engine
from omni_grpc.media_in.decoder import Decoder
from omni_grpc.media_in.inputs import InputFile
from omni_grpc.server.fields import refused
from omni_grpc.server.requests import GenerationRequest
from omni_grpc.types.errors import NotFound
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.results import RequestWarning
from omni_grpc.v1 import media_pb2

DECODERS = 2
"""Processes, and so requests whose media are decoded at the same time: each may take as much memory as the limits
allow.
"""
PLACEHOLDER = ImageInput(width=0, height=0, channels=0, data=b"")
"""Stands for an input of any kind before it is decoded."""
NAMES: Mapping[str, str] = {"reference": "audio"}
"""Fields of requests whose name in Inputs is another."""


class MediaReader:
    """Reads the media of requests. It belongs to one event loop, which it never holds up: threads wait for the
    processes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all = [Decoder(engine.config.limits) for _ in range(DECODERS)]
        # the one that was used last is taken first, so that a second process is started only where there is need
        self._idle: asyncio.LifoQueue[Decoder] = asyncio.LifoQueue()
        for decoder in self._all:
            self._idle.put_nowait(decoder)

    async def read(self, request: GenerationRequest) -> tuple[Inputs, tuple[RequestWarning, ...]]:
        """What the media hold, in shared memory, and how they were converted. Whoever gets it hands it to the engine,
        or frees it.

        Raises InvalidArgument that names the input, NotFound (ASSET_NOT_FOUND) for one that is not stored here,
        ResourceExhausted (INPUTS_FULL) where there is no room. Cancelled, it stops the decoding.
        """
        files = [self._file(path, name, message) for path, name, message in _messages(request)]
        if not files:
            return Inputs(), ()
        decoder = await self._idle.get()
        work = asyncio.ensure_future(asyncio.to_thread(decoder.decode, files, self._engine.inputs))
        work.add_done_callback(lambda _: self._idle.put_nowait(decoder))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            decoder.kill()
            work.add_done_callback(self._discard)
            raise

    def close(self) -> None:
        """Ends the processes."""
        for decoder in self._all:
            decoder.kill()

    def _discard(self, work: asyncio.Future[tuple[Inputs, tuple[RequestWarning, ...]]]) -> None:
        """Nobody waits for these inputs any more. An error is nobody's either."""
        if work.exception() is None:
            self._engine.inputs.free(work.result()[0])

    def _file(self, path: str, name: str, message: media_pb2.MediaInput) -> InputFile:
        data, mime_type = message.data, message.mime_type
        match message.WhichOneof("source"):
            case None:
                raise refused(path, "has no source: set one of data, asset_id, uri")
            case "asset_id":
                data, stored_type = self._stored(f"{path}.asset_id", message.asset_id)
                mime_type = mime_type or stored_type
            case "uri" if not message.uri:
                raise refused(f"{path}.uri", "is empty")
        return InputFile(path=path, name=name, data=data, uri=message.uri, mime_type=mime_type, sha256=message.sha256)

    def _stored(self, path: str, name: str) -> tuple[bytes, str]:
        """An uploaded asset, whose expiry is extended, or an output of an earlier job."""
        for store in (self._engine.assets, self._engine.artifacts):
            try:
                found, data = store.get(name)
            except NotFound:
                continue
            return data, found.mime_type
        raise self._engine.forgotten.not_found(name, reason="ASSET_NOT_FOUND", path=path, hint="upload it again")


def expected(request: GenerationRequest) -> Inputs:
    """The inputs as they will be, with placeholders for what is not decoded yet."""
    found: dict[str, Any] = {}
    for path, name, _ in _messages(request):
        # of a repeated field the path has an index
        found[name] = (*found.get(name, ()), PLACEHOLDER) if path.endswith("]") else PLACEHOLDER
    return Inputs(**found)


def _messages(request: GenerationRequest) -> Iterator[tuple[str, str, media_pb2.MediaInput]]:
    """Path, name in Inputs and content of every input."""
    for field, value in request.ListFields():
        if field.message_type is None or field.message_type.name != "MediaInput":
            continue
        name = NAMES.get(field.name, field.name)
        if field.is_repeated:
            for i, entry in enumerate(value):
                yield f"{field.name}[{i}]", name, entry
        else:
            yield field.name, name, value
