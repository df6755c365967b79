"""When the events of a job reached a watcher. Server and watcher share a machine, and so a clock."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from omni_grpc.client import Client
from omni_grpc.v1.event_pb2 import JobEvent

from .server import PATIENCE

STEP = "step_progress"
TERMINAL = ("completed", "failed", "cancelled")


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One event. `sent` is when it happened, by the server; both times in Unix seconds. `size` is in bytes."""

    seq: int
    kind: str
    sent: float
    arrived: float
    coalesced: int
    size: int

    @property
    def lag(self) -> float:
        """Seconds from when it happened to when the watcher had it."""
        return self.arrived - self.sent


def arrival(event: JobEvent) -> Arrival:
    """Notes an event that has just come."""
    return Arrival(
        seq=event.seq,
        kind=event.WhichOneof("event") or "",
        sent=event.time.ToNanoseconds() / 1e9,
        arrived=time.time(),
        coalesced=event.coalesced,
        size=event.ByteSize(),
    )


def log(client: Client, job_id: str) -> list[JobEvent]:
    """The whole log of a job, once it has ended: a watcher that comes late is sent every event."""
    return list(client.watch_job(job_id, timeout=PATIENCE))


def states(events: Sequence[JobEvent]) -> list[int]:
    """The seq of every event that no watcher may miss."""
    return [event.seq for event in events if not event.HasField(STEP)]


def in_order(arrivals: Sequence[Arrival]) -> bool:
    """Whether each event came once, after those that happened before it."""
    return all(one.seq < other.seq for one, other in itertools.pairwise(arrivals))
