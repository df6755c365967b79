"""The media that a request brings along: where their bytes are. They are decoded before the engine sees the request,
by processes of their own.

Bytes come with the request, in a data: URL, from an asset or an output that is stored here, or from a host that the
operator lists.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from omni_grpc.fleet import Fleet
from omni_grpc.gate.ask import Medium
from omni_grpc.gate.refusals import refused
from omni_grpc.gate.stored import Stored
from omni_grpc.media_in import fetch
from omni_grpc.media_in.decoder import Decoder
from omni_grpc.media_in.inputs import InputFile
from omni_grpc.media_in.source import kind_of
from omni_grpc.outbound import Outbound
from omni_grpc.types.caller import Caller
from omni_grpc.types.media import Inputs
from omni_grpc.types.results import RequestWarning

DECODERS = 2
"""Processes, and so requests whose media are decoded at the same time: each may take as much memory as the limits
allow.
"""
FETCHES = 4
"""Requests whose media are fetched at the same time, each of them up to the limit for inputs. A place is kept until
they are decoded, so this bounds the memory that fetched media take.
"""


def is_video(data: bytes) -> bool:
    """Whether bytes are a video, by the first of them."""
    return kind_of(data).startswith("video/")


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """The decoded media of a request, how they were converted, and the files that they were."""

    inputs: Inputs = Inputs()
    notes: tuple[RequestWarning, ...] = ()
    files: Sequence[InputFile] = ()


class MediaReader:
    """Reads the media of requests. It belongs to one event loop, which it never holds up: threads wait for the
    processes.
    """

    def __init__(self, fleet: Fleet, stored: Stored) -> None:
        self._fleet = fleet
        self._stored = stored
        self._all = [Decoder(fleet.config.limits, fleet.config.logs) for _ in range(DECODERS)]
        # the one that was used last is taken first, so that a second process is started only where there is need
        self._idle: asyncio.LifoQueue[Decoder] = asyncio.LifoQueue()
        for decoder in self._all:
            self._idle.put_nowait(decoder)
        self._outbound = Outbound(fleet.config.outbound)
        self._fetches = asyncio.Semaphore(FETCHES)

    async def read(self, caller: Caller, media: Sequence[Medium]) -> Media:
        """What the media hold, in shared memory, and how they were converted. Whoever gets it hands it to the engine,
        or frees it.

        Raises InvalidArgument that names the input, NotFound (ASSET_NOT_FOUND) for one that is not stored here,
        ResourceExhausted (INPUTS_FULL) where there is no room, FailedPrecondition or Unavailable for a URL that cannot
        be fetched. Cancelled, it stops the fetching and the decoding.
        """
        files = [await self._file(caller, medium) for medium in media]
        if not any(map(fetch.is_remote, files)):
            return await self.decode(files, caller.tenant)
        fetch.check(files, self._outbound)
        async with self._fetches:
            most = self._fleet.config.limits.max_input_bytes
            return await self.decode(await fetch.fetched(files, self._outbound, max_bytes=most), caller.tenant)

    async def decode(self, files: Sequence[InputFile], tenant: str) -> Media:
        """What files hold whose bytes are here."""
        if not files:
            return Media()
        decoder = await self._idle.get()
        work = asyncio.ensure_future(asyncio.to_thread(decoder.decode, files, self._fleet.inputs.of(tenant)))
        work.add_done_callback(lambda _: self._idle.put_nowait(decoder))
        try:
            inputs, notes = await asyncio.shield(work)
            return Media(inputs, notes, files)
        except asyncio.CancelledError:
            decoder.kill()
            work.add_done_callback(self._discard)
            raise

    def close(self) -> None:
        """Ends the processes and threads."""
        for decoder in self._all:
            decoder.kill()
        self._outbound.close()

    def _discard(self, work: asyncio.Future[tuple[Inputs, tuple[RequestWarning, ...]]]) -> None:
        """Nobody waits for these inputs any more. An error is nobody's either."""
        if work.exception() is None:
            self._fleet.inputs.free(work.result()[0])

    async def _file(self, caller: Caller, medium: Medium) -> InputFile:
        path, data, mime_type = medium.path, medium.data, medium.mime_type
        if medium.asset_id is not None:
            data, stored_type = await self._stored.medium(caller, f"{path}.asset_id", medium.asset_id)
            mime_type = mime_type or stored_type
        elif medium.uri == "":
            raise refused(f"{path}.uri", "is empty")
        elif data is None and medium.uri is None:
            raise refused(path, "has no source: set one of data, asset_id, uri")
        return InputFile(
            path=path,
            name=medium.name,
            data=data or b"",
            uri=medium.uri or "",
            mime_type=mime_type,
            sha256=medium.sha256,
        )
