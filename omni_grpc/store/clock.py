"""The time by which jobs expire and leases run out."""

from __future__ import annotations

import time
from collections.abc import Callable


def elapsed() -> float:
    """Seconds since some moment, also those that the machine slept where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Clock:
    """Called, it says the time in Unix seconds. It goes on evenly: where the clock of the machine is set while a server
    runs, no hour passes or comes again, so nothing expires early or stays forever. Servers that share a database have
    the time of that in common.
    """

    def __init__(self, elapsed: Callable[[], float] = elapsed) -> None:
        self._elapsed = elapsed
        self._began = time.time() - elapsed()

    def __call__(self) -> float:
        return self._began + self._elapsed()

    def set(self, now: float) -> None:
        """It is `now`, in Unix seconds, by a clock that other servers go by too."""
        self._began = now - self._elapsed()

    def earliest(self) -> float:
        """The earlier of this time and that of the machine: for the age of what the machine has dated."""
        return min(self(), time.time())
