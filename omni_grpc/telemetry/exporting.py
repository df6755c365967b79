"""Sends spans from a thread of its own: who hands one over never waits, whatever becomes of the collector."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from omni_grpc.telemetry.span import Span

logger = logging.getLogger(__name__)

Make = Callable[[], Sequence[Span]]
"""Makes spans when it is called, in the thread that sends them."""

PATIENCE_WHEN_FAILING = 1.0
"""Seconds that `close` gives a collector that took nothing the last time."""


class Sink(Protocol):
    """Where spans go. Its methods are called from one thread, but for `shutdown`."""

    def send(self, spans: Sequence[Span]) -> str | None:
        """Sends them, and waits for that. None, or why they could not be sent."""

    def shutdown(self) -> None:
        """Has a `send` that waits end soon."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A queue holds at most `most` entries, of which up to `batch` are sent together, at the latest `delay` seconds
    after they came.
    """

    most: int = 2048
    batch: int = 512
    delay: float = 5.0


class Exporting:
    """A queue and its thread. What there is no room for, and what cannot be sent, is dropped and counted."""

    def __init__(self, sink: Sink, *, where: str, limits: Limits | None = None) -> None:
        self._sink = sink
        self._where = where
        limits = limits or Limits()
        self._most, self._batch, self._delay = limits.most, min(limits.batch, limits.most), limits.delay
        self._queue: collections.deque[Make] = collections.deque()
        self._wanted = threading.Event()
        self._closing = False
        self._until = float("inf")
        self._lost_since = 0
        self._full = 0
        self.failing = False
        """Whether the newest spans could not be sent."""
        self.sent = 0
        """Spans that the collector has taken."""
        self.dropped = 0
        """Spans that it has not, and entries that found the queue full."""
        self._thread = threading.Thread(target=self._run, name="omni_grpc-traces", daemon=True)
        self._thread.start()

    def give(self, make: Make) -> None:
        """Takes spans, or drops them where the queue is full. May be called from any thread."""
        if len(self._queue) >= self._most:
            self._full += 1
            return
        self._queue.append(make)
        if len(self._queue) >= self._batch:
            self._wanted.set()

    def close(self, timeout: float) -> None:
        """Sends what is left, for `timeout` seconds at most, and less where the collector does not answer anyway."""
        if self.failing:
            timeout = min(timeout, PATIENCE_WHEN_FAILING)
        self._until = time.monotonic() + timeout
        self._closing = True
        self._wanted.set()
        self._thread.join(timeout)
        late = self._thread.is_alive()
        self._sink.shutdown()
        if late:
            self._thread.join(PATIENCE_WHEN_FAILING)
        if self._queue or self.failing or self._full:
            self._count_full()
            self.dropped += len(self._queue)
            logger.warning("closed with %d spans that did not reach %s", self.dropped, self._where)

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._delay)
            self._wanted.clear()
            while self._queue and time.monotonic() < self._until:
                self._send_some()
            self._count_full()
            if self._closing:
                return

    def _send_some(self) -> None:
        spans = list(self._made(self._queue.popleft() for _ in range(min(len(self._queue), self._batch))))
        if not spans:
            return
        try:
            why = self._sink.send(spans)
        except Exception as error:
            # an exporter of others: whatever it raises costs these spans, and not the thread
            logger.exception("spans could not be sent")
            why = f"{type(error).__name__}: {error}"
        if why is None:
            self.sent += len(spans)
            self._reached()
        else:
            self._lost(len(spans), why)

    def _made(self, entries: Iterable[Make]) -> Iterable[Span]:
        for make in entries:
            try:
                yield from make()
            except Exception:
                logger.exception("spans could not be made")
                self.dropped += 1

    def _reached(self) -> None:
        if self.failing:
            self.failing = False
            logger.info("spans reach %s again; %d were dropped", self._where, self.dropped - self._lost_since)

    def _lost(self, count: int, why: str) -> None:
        if not self.failing:
            self.failing = True
            self._lost_since = self.dropped
            logger.warning("spans do not reach %s, and are dropped until they do: %s", self._where, why)
        self.dropped += count

    def _count_full(self) -> None:
        if full := self._full:
            # no lock: an entry that comes meanwhile may be missed in the count, and is not worth one for each span
            self._full = 0
            self.dropped += full
            logger.warning("%d calls and jobs have no spans: they came faster than %s takes them", full, self._where)
