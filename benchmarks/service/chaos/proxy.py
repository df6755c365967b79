"""A TCP proxy that delays, loses, stalls, refuses and resets: a bad network on any machine, without rights or qdiscs.

It stands in front of a server, or between a server and its database. To both sides a packet that is lost is one that
comes a retransmission later, since TCP hides the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

PIECE = 16 * 1024
"""Most bytes that travel as one: what is delayed, or lost, together."""
AHEAD = 64
"""Pieces that one direction of a connection holds while they are delayed; then its sender waits."""
RETRANSMISSION = 0.2
"""Seconds until TCP sends again what was lost: Linux's least."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close resets the connection instead of ending it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weather:
    """`delay`: seconds that every piece takes, give or take `jitter`. `loss`: the share of pieces that are lost, and
    come after a retransmission. `cuts`: resets of a connection per second. `stalled`: nothing comes through, and
    nobody is told. `refusing`: new connections are reset.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    cuts: float = 0.0
    stalled: bool = False
    refusing: bool = False


CLEAR = Weather()


class Proxy:
    """Listens on a port of 127.0.0.1 from its start to its close. `target`: a path of a Unix socket or (host, port)."""

    def __init__(self, target: str | tuple[str, int], seed: int = 0) -> None:
        self._target = target
        self._chance = random.Random(seed)
        self._weather = CLEAR
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni_grpc-proxy", daemon=True)
        self._thread.start()
        self._server = self._on_loop(self._listen()).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.connections = 0
        """How many were made to it."""

    def close(self) -> None:
        async def ending() -> None:
            self._server.close()
            self._cut()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._on_loop(ending()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @contextlib.contextmanager
    def weather(self, weather: Weather) -> Iterator[None]:
        """For the length of the block; then what is open goes on, and all is well."""
        self._set(weather)
        try:
            yield
        finally:
            self._set(CLEAR)

    def cut(self) -> None:
        """Resets every connection."""
        self._call(self._cut)

    # --- on its loop --------------------------------------------------------------------------------------------------

    def _on_loop(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Callable[[], None]) -> None:
        async def calling() -> None:
            work()

        self._on_loop(calling()).result(10)

    def _set(self, weather: Weather) -> None:
        def setting() -> None:
            self._weather = weather
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

        self._call(setting)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=4096)

    def _cut(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._weather.refusing:
            _reset(writer)
            return
        try:
            if isinstance(self._target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self._target)
            else:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            # as a host whose port is closed
            _reset(writer)
            return
        both = (writer, far_writer)
        self._writers.update(both)
        tasks = [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
            asyncio.create_task(self._lightning(both)),
        ]
        try:
            # the first to end is a reset, the second half of an orderly end, or the cut
            await asyncio.wait(tasks[:2], return_when=asyncio.ALL_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writers.difference_update(both)
            for one in both:
                one.close()

    async def _lightning(self, both: Sequence[asyncio.StreamWriter]) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self._weather.cuts and self._chance.random() < self._weather.cuts * 0.05:
                for writer in both:
                    _reset(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(AHEAD)
        sending = asyncio.create_task(self._send(pieces, writer))
        due = 0.0
        try:
            while piece := await reader.read(PIECE):
                # in order, as TCP gives them: those behind one that was lost wait for it
                due = max(due, time.monotonic() + self._takes())
                await pieces.put((due, piece))
            await pieces.put((due, b""))
            await sending
        except OSError:
            # one side was reset: so is the other
            _reset(writer)
        finally:
            sending.cancel()

    def _takes(self) -> float:
        weather = self._weather
        seconds = weather.delay + self._chance.uniform(-weather.jitter, weather.jitter)
        lost = weather.loss and self._chance.random() < weather.loss
        return max(0.0, seconds) + (RETRANSMISSION if lost else 0.0)

    async def _send(self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, piece = await pieces.get()
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            while self._weather.stalled:
                await self._changed.wait()
            try:
                if not piece:
                    writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()
            except OSError:
                _reset(writer)
                return


def _reset(writer: asyncio.StreamWriter) -> None:
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None and found.family != socket.AF_UNIX and found.fileno() >= 0:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
