"""What a service manager is told of a server: that it is ready, that it stops, and that its loop still runs.

The protocol is sd_notify(3): datagrams to the Unix socket that NOTIFY_SOCKET names. systemd sets it for units of
Type=notify, and some container runtimes pass it on. Without it nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping

from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

MICROSECONDS = 1e6


class ServiceManager:
    """Whoever started this process. `watchdog` is after how many seconds of silence it takes the process for hung."""

    def __init__(self, address: str | None, watchdog: float | None = None) -> None:
        self._address = address
        self._watchdog = watchdog

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ServiceManager:
        """The one that the environment names. A watchdog that is meant for another process is left out."""
        whose = environ.get("WATCHDOG_PID")
        interval = environ.get("WATCHDOG_USEC", "")
        watched = interval.isdigit() and int(interval) > 0 and whose in (None, str(os.getpid()))
        return cls(environ.get("NOTIFY_SOCKET") or None, int(interval) / MICROSECONDS if watched else None)

    @contextlib.contextmanager
    def running(self, status: str) -> Iterator[None]:
        """Says that the server is ready, and then that it stops. In between the event loop gives signs of life."""
        self.tell("READY=1", f"STATUS={status}")
        watched = None if self._watchdog is None else asyncio.create_task(self._keep_alive(self._watchdog / 2))
        try:
            yield
        finally:
            if watched is not None:
                watched.cancel()
            self.tell("STOPPING=1", "STATUS=draining")

    def tell(self, *assignments: str) -> None:
        """Sends assignments, such as READY=1. A manager that cannot be reached is logged: the server goes on."""
        if self._address is None:
            return
        # a name that begins with @ is in the abstract namespace
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                # the manager may be busy, but the loop is not to wait for it
                sender.setblocking(False)
                sender.sendto("\n".join(assignments).encode(), address)
        except OSError as error:
            logger.warning("the service manager was not told %s: %s: %s", assignments[0], self._address, plain(error))

    async def _keep_alive(self, pause: float) -> None:
        while True:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(pause)
