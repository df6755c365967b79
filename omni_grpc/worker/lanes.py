"""Which threads of a worker are at work on the device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Lanes:
    """Threads that work beside each other, and one that now and then has to be alone.

    What a capture of launches cannot bear from other threads: that they wait for the device, draw from its generator,
    or make its allocator give memory back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._alone = False

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Waits while somebody is alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Does not wait: gives whether nobody is at work, and in that case whoever comes waits until the end."""
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
