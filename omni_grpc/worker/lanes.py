"""Which threads of a worker use the device, and when one of them has exclusive use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Lanes:
    """Threads that share the device, and one that sometimes needs it exclusively.

    While a CUDA graph is captured, no other thread may wait for the device, draw from its random generator, or make its
    allocator free memory.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._alone = False

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Shared use; waits while another thread has the device exclusively."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Exclusive use, if it is free right now: yields whether no other thread is at work. If so, others wait until
        the end of the block.
        """
        with self._changed:
            quiet = not self._working and not self._alone
            self._alone |= quiet
        try:
            yield quiet
        finally:
            if quiet:
                with self._changed:
                    self._alone = False
                    self._changed.notify_all()
