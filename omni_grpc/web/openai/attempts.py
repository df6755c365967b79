"""Which call a repeated request belongs to.

The official clients repeat a call by themselves, after a lost connection, a time-out or an answer that allows it. They
number the attempts (`x-stainless-retry-count`, from 0), but send nothing that says which call they belong to. Two calls
with the same body are two calls: with random seeds, both results are wanted. So an attempt with a number above 0 is
matched with an earlier attempt of the same caller with the same body and a lower number, which nothing else has
repeated yet, and shares its request_id, by which the gate knows the job. An earlier attempt that was refused has no
job, and its repetition gets a new id: of several attempts that fit, such a one is taken before one that may belong to
another call.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Iterator

KEPT_SECONDS = 60.0
"""How long an attempt that has ended can still be repeated. The clients wait 8 seconds at most of their own accord."""


class End(enum.IntEnum):
    """How an attempt stands, those first whose repetition is the most certain."""

    LOST = 0
    """Its client left before it had the answer."""
    REFUSED = 1
    OPEN = 2
    """Its client may have left without our knowing."""
    ANSWERED = 3
    """The answer was sent, and may not have arrived."""


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a call. `repeats`: an earlier one has the same request_id."""

    number: int
    request_id: str
    repeats: bool
    end: End = End.OPEN


class Attempts:
    """The attempts that are open or have just ended, of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_call: dict[bytes, list[Attempt]] = {}
        self._ended: collections.deque[tuple[float, bytes, Attempt]] = collections.deque()
        self._by_id: dict[str, tuple[bytes, Attempt]] = {}
        """The newest that has ended of each request_id."""

    @contextlib.contextmanager
    def attempt(self, call: bytes, number: int, request_id: str) -> Iterator[Attempt]:
        """An attempt of the calls that look the same (`call`), for as long as it is open. `request_id`: what it has
        unless it repeats another.
        """
        self._forget()
        earlier = self._take_earlier(call, number)
        shares = earlier is not None and earlier.end is not End.REFUSED
        attempt = Attempt(number, earlier.request_id if earlier is not None and shares else request_id, shares)
        self._by_call.setdefault(call, []).append(attempt)
        try:
            yield attempt
            attempt.end = End.ANSWERED
        except Exception:
            attempt.end = End.REFUSED
            raise
        except BaseException:
            attempt.end = End.LOST
            raise
        finally:
            self._ended.append((self._clock(), call, attempt))
            self._by_id[attempt.request_id] = (call, attempt)

    def received(self, request_id: str) -> None:
        """The client knows the job of this id: the answer that named it has arrived."""
        if (found := self._by_id.get(request_id)) is not None:
            self._drop(*found)

    def _take_earlier(self, call: bytes, number: int) -> Attempt | None:
        fitting = [one for one in self._by_call.get(call, ()) if one.number < number]
        if not fitting:
            return None
        found = min(fitting, key=lambda one: (one.end, -one.number))
        # nothing else repeats it
        self._drop(call, found)
        return found

    def _forget(self) -> None:
        while self._ended and self._ended[0][0] < self._clock() - KEPT_SECONDS:
            _, call, attempt = self._ended.popleft()
            self._drop(call, attempt)
            if self._by_id.get(attempt.request_id) == (call, attempt):
                del self._by_id[attempt.request_id]

    def _drop(self, call: bytes, attempt: Attempt) -> None:
        left = [one for one in self._by_call.get(call, ()) if one is not attempt]
        if left:
            self._by_call[call] = left
        else:
            self._by_call.pop(call, None)
