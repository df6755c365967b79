"""One server after the other on the same addresses: what the one that listens tells its successor, over a Unix socket
that this user alone can open.

Messages are lines of JSON. The successor connects and is told who listens, and where; it begins to listen beside that
one, has new connections come to itself, and says so ({"leave": true}). The connection ends with the one that left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from omni_grpc.server.steering import listening, steer
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

PRIVATE = 0o177
"""The umask of the socket."""
ANSWER_SECONDS = 10.0
"""How long the one that listens may take to answer."""
Address = tuple[str, int]
Listener = tuple[int, int]
"""Family and port of sockets that listen."""


class Offering:
    """The socket at which a server waits for its successor."""

    def __init__(self, path: Path, addresses: Callable[[], Mapping[str, Address]], rows: str) -> None:
        """`addresses`: setting that names one -> host and port; `rows`: what keeps jobs."""
        self._path = path
        self._addresses = addresses
        self._rows = rows
        self.left = asyncio.Event()
        """Set when a successor listens."""
        self._server: asyncio.Server | None = None
        self._file: os.stat_result | None = None
        self._successor: asyncio.StreamWriter | None = None

    async def predecessor(self, wanted: Mapping[str, Address]) -> Predecessor | None:
        """The server that listens at the path, if there is any. Raises ConfigError (HANDOVER_REFUSED)."""
        found = await Predecessor.find(self._path)
        if found is not None:
            try:
                found.check(wanted)
            except BaseException:
                found.give_up()
                raise
        return found

    async def start(self) -> None:
        """Takes the path, from whoever had it. Raises ConfigError (CANNOT_LISTEN)."""
        mask = os.umask(PRIVATE)
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._on_successor, self._path)
            self._file = os.stat(self._path)
        except OSError as error:
            message = f"cannot listen on {self._path}: {plain(error)}; choose another --handover"
            raise ConfigError(message, reason="CANNOT_LISTEN", violations=(Violation("handover", message),)) from error
        finally:
            os.umask(mask)

    async def stop(self) -> None:
        """To be called last: a successor that waits goes on then."""
        if self._server is None:
            return
        self._server.close()
        with contextlib.suppress(OSError):
            # not the file of a successor
            if self._file is not None and os.path.samestat(os.stat(self._path), self._file):
                self._path.unlink()
        if self._successor is not None:
            self._successor.close()

    async def _on_successor(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._successor is not None:
            _say(writer, {"error": "another server is taking over already"})
            writer.close()
            return
        self._successor = writer
        _say(writer, self._about())
        asked = await _heard(reader)
        if asked is None or not asked.get("leave"):
            # it has given up: this one goes on
            logger.info("a successor came, and has gone again")
            self._successor = None
            writer.close()
            return
        logger.info("process %s takes over", asked.get("pid"))
        _say(writer, {"leaving": True})
        self.left.set()

    def _about(self) -> Mapping[str, Any]:
        addresses = self._addresses()
        ports = {port for _, port in addresses.values()}
        told = {"addresses": addresses, "listeners": listeners(ports)}
        return {"pid": os.getpid(), "rows": self._rows, **told}


class Predecessor:
    """The server that listens at a path. `addresses`: setting that names one -> host and port."""

    def __init__(self, about: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = int(about["pid"])
        self.rows = str(about["rows"])
        self.addresses: Mapping[str, Address] = {
            name: (host, int(port)) for name, (host, port) in about["addresses"].items()
        }
        self._listeners: Mapping[Listener, int] = {(family, port): count for family, port, count in about["listeners"]}
        self._reader, self._writer = reader, writer

    @classmethod
    async def find(cls, path: Path) -> Predecessor | None:
        """The one that offers to leave, if there is any. Raises ConfigError (HANDOVER_REFUSED)."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise _refused(f"{path} cannot be opened: {plain(error)}") from error
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                about = await _heard(reader)
        except TimeoutError:
            about = {"error": f"it does not answer for {ANSWER_SECONDS:g} s"}
        if about is None or "error" in about:
            writer.close()
            raise _refused(f"the server at {path} does not leave: {(about or {}).get('error', 'it has just ended')}")
        return cls(about, reader, writer)

    def check(self, wanted: Mapping[str, Address]) -> None:
        """Raises ConfigError (HANDOVER_REFUSED) where it listens elsewhere; a port of 0 is that which it has."""
        for name, (host, port) in wanted.items():
            has = self.addresses.get(name)
            if has is not None and (has[0] != host or port not in (0, has[1])):
                flag = "--" + name.replace("_", "-")
                raise _refused(
                    f"the server that listens, process {self.pid}, has {has[0]}:{has[1]} where this one is to have "
                    f"{host}:{port}; give both the same {flag}, or stop that one first"
                )

    def port(self, name: str, port: int) -> int:
        """The port to listen on."""
        return self.addresses[name][1] if name in self.addresses and not port else port

    def has(self, name: str) -> bool:
        """Whether it listens there, and may be listened beside."""
        return name in self.addresses

    def steer(self) -> None:
        """Has new connections come here, where this process listens beside it."""
        with listening({port for _, port in self._listeners}) as sockets:
            for one in sockets:
                try:
                    steer(one, self._listeners.get(_listener(one), 0))
                except OSError as error:
                    logger.warning(
                        "new connections go to both servers until the other one has left (%s); one that it has not "
                        "taken by then is reset",
                        plain(error),
                    )

    async def leave(self) -> None:
        """Has it leave, since this one listens: new connections come here, and it ends what it has."""
        self.steer()
        _say(self._writer, {"leave": True, "pid": os.getpid()})
        if await _heard(self._reader) is None:
            logger.info("the server before this one has ended by itself")

    async def gone(self) -> None:
        """Returns when it has ended."""
        while await _heard(self._reader) is not None:
            pass
        self._writer.close()

    async def __aenter__(self) -> Predecessor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        # one that has been asked to leave does not mind; another one goes on
        self.give_up()

    def give_up(self) -> None:
        """It stays: this one does not come."""
        self._writer.close()


def listeners(ports: Collection[int]) -> list[tuple[int, int, int]]:
    """Family, port, and how many sockets of this process listen there."""
    with listening(ports) as sockets:
        return [(*key, count) for key, count in Counter(map(_listener, sockets)).items()]


def _listener(one: socket.socket) -> Listener:
    return int(one.family), int(one.getsockname()[1])


def _refused(message: str) -> ConfigError:
    return ConfigError(message, reason="HANDOVER_REFUSED", violations=(Violation("handover", message),))


def _say(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _heard(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    if not line.endswith(b"\n"):
        return None
    message: dict[str, Any] = json.loads(line)
    return message
