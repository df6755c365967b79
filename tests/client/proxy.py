"""A TCP proxy that does to a connection what networks do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Proxy:
    """Forwards to a port of this machine. Belongs to the event loop that it was started on."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.connections = 0
        """How many there have been."""
        self.refuse = False
        """New connections are dropped at once."""
        self.mute = False
        """What the server sends is thrown away."""
        self.target = target
        """Where new connections go."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._budget: int | None = None
        self._needle = b""

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Drops every connection now."""
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, size: int) -> None:
        """Drops every connection, once, when the server has sent `size` more bytes through it."""
        self._budget = size

    def corrupt(self, needle: bytes) -> None:
        """Changes the last byte of `needle`, once, when it comes by from the server."""
        self._needle = needle

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuse:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, far_writer}
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._up(reader, far_writer), self._down(far_reader, writer))
        writer.transport.abort()
        far_writer.transport.abort()
        self._writers -= {writer, far_writer}

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 14):
            if self._needle and self._needle in data:
                wrong = self._needle[:-1] + bytes([self._needle[-1] ^ 1])
                data, self._needle = data.replace(self._needle, wrong, 1), b""
            if self.mute:
                continue
            writer.write(data)
            await writer.drain()
            if self._budget is not None:
                self._budget -= len(data)
                if self._budget <= 0:
                    self._budget = None
                    self.cut()
        writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    """Returns when something that nobody announces has come true; the test's own time-out ends the wait."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
