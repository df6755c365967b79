"""A connection between the server and a rank on another host: messages in both directions, and signs of life.

Messages are pickled, as through the pipe of a worker: whoever knows the secret can run code on the other side. Each
side has to prove that it knows it before anything is read of it, as `multiprocessing.connection` does. Nothing is
encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Beat

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
GREETING_SECONDS = 10.0
"""How long the other side gets for each part of a greeting."""
FLUSH_SECONDS = 5.0
"""How long what was said last gets to be sent."""


def greeted(sock: socket.socket, secret: bytes, *, server: bool) -> Connection:
    """The connection, once both sides have proved that they know the secret. Raises OSError (AuthenticationError is not
    one: it is turned into PermissionError) or EOFError, and closes it then.
    """
    connection = Connection(os.dup(sock.fileno()))
    try:
        _limit(sock, GREETING_SECONDS)
        if server:
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
        else:
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
        _limit(sock, 0.0)
    except Exception as error:
        connection.close()
        sock.close()
        if isinstance(error, OSError | EOFError):
            raise
        # AuthenticationError, and what comes of bytes that are no greeting
        raise PermissionError(f"the other side does not know the secret: {plain(error)}") from error
    return connection


def _limit(sock: socket.socket, seconds: float) -> None:
    """Has each read and write of its descriptor fail after so long; 0: never."""
    sock.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


class Line:
    """A connection that has been greeted, with a thread that reads and one that writes.

    on_message and on_end, which gets why, once, are called on the event loop that made it, in order.
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        patience: float,
        *,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`patience`: seconds that the other side may be silent."""
        self._sock, self._connection, self._patience = sock, connection, patience
        self._loop, self._on_message, self._on_end = loop, on_message, on_end
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="omni_grpc-line-out", daemon=True)
        self._reader = threading.Thread(target=self._read, name="omni_grpc-line-in", daemon=True)
        self._writer.start()
        self._reader.start()

    def say(self, message: Any) -> None:
        """Sends a message after those before, and returns at once. Where the line has ended, it is lost. A callable is
        called first, in the thread that writes, for the message; what raises OSError there is logged.
        """
        self._said.put(message)

    def close(self) -> None:
        """Ends the line once what was said has been sent, FLUSH_SECONDS at most."""
        self._said.put(None)
        self._writer.join(FLUSH_SECONDS)
        self.cut()

    def cut(self) -> None:
        """Ends the line at once."""
        with contextlib.suppress(OSError):
            # it wakes both threads; the other side may have done so already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        try:
            while True:
                try:
                    message = self._said.get(timeout=BEAT_SECONDS)
                except queue.Empty:
                    message = Beat()
                if message is None:
                    return
                self._connection.send(message() if callable(message) else message)
        except OSError as error:
            # the reader finds the end too, and tells it
            logger.debug("a line to another host cannot be written to: %s", plain(error))
            self.cut()

    def _read(self) -> None:
        try:
            while True:
                if not self._connection.poll(self._patience):
                    why = f"no sign of life for {self._patience:g} s"
                    break
                message = self._connection.recv()
                if not isinstance(message, Beat):
                    self._loop.call_soon_threadsafe(self._on_message, message)
        except EOFError:
            why = "end of file"
        except OSError as error:
            why = plain(error)
        except Exception as error:
            logger.exception("a message from another host cannot be read")
            why = f"a message that cannot be read: {type(error).__name__}: {plain(error)}"
        self.cut()
        self._said.put(None)
        with contextlib.suppress(RuntimeError):
            # the loop may be closed
            self._loop.call_soon_threadsafe(self._on_end, why)
