"""Follows a job through its event log. Each follower has its own position and pace; the engine waits for none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable

from omni_grpc.engine import Engine, Entry, Job
from omni_grpc.types.errors import OutOfRange
from omni_grpc.types.events import DecodeProgress, StepProgress

MAX_BEHIND = 8
"""Steps that a follower may lag behind before the ones in between are skipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A log entry as one follower receives it. `after` is the seq of the entry that it received before, or its cursor;
    `coalesced` counts the progress entries that were skipped since then.
    """

    entry: Entry
    after: int
    coalesced: int = 0


class Pace:
    """Thins out progress entries so that two of them are at least `interval` seconds apart; the last step and all other
    entries pass.

    Of the entries in between, the newest is held back, and sent when the interval is over unless another overtakes it.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic, *, after_seq: int = 0) -> None:
        self._interval = interval
        self._clock = clock
        self._after = after_seq
        self._next = float("-inf")
        self._held: Entry | None = None
        self._missed = 0

    def take(self, entry: Entry) -> Update | None:
        """The update to send for this entry; None: nothing yet."""
        if self._held is not None:
            self._held = None
            self._missed += 1
        if self._interval and _can_wait(entry):
            if self._clock() < self._next:
                self._held = entry
                return None
            self._next = self._clock() + self._interval
        return self._send(entry)

    def skip(self) -> None:
        """Counts a progress entry that the follower was too slow for."""
        self._missed += 1

    def due(self) -> float | None:
        """Seconds until the entry that is held back may be sent; None if there is none."""
        return None if self._held is None else max(0.0, self._next - self._clock())

    def release(self) -> Update:
        """The entry that was held back. Call it when `due` is over."""
        assert self._held is not None
        entry, self._held = self._held, None
        self._next = self._clock() + self._interval
        return self._send(entry)

    def _send(self, entry: Entry) -> Update:
        update = Update(entry, self._after, self._missed)
        self._after, self._missed = entry.seq, 0
        return update


def _can_wait(entry: Entry) -> bool:
    match entry.event:
        case StepProgress(step=step, total_steps=total):
            # the last one is promised to every watcher
            return step < total
        case DecodeProgress():
            return True
    return False


def check_cursor(job: Job, after_seq: int) -> int:
    """The cursor, or OutOfRange where the job has not come that far."""
    if after_seq > job.last_seq:
        raise OutOfRange(
            f"after_seq is {after_seq}, but job {job.id} is at {job.last_seq}; continue from Job.last_seq (GetJob)",
            reason="AFTER_SEQ_OUT_OF_RANGE",
            metadata={"job_id": job.id, "last_seq": str(job.last_seq)},
        )
    return after_seq


async def follow(
    engine: Engine, job: Job, after_seq: int, *, interval: float, heartbeat: float | None
) -> AsyncGenerator[Update | None]:
    """The entries of a job with a greater seq, to its end; None after every `heartbeat` seconds of silence.

    What is there when it begins comes whole. Afterwards a follower that falls more than MAX_BEHIND steps behind gets
    the newest of them alone; other entries are never left out. While this runs it counts as a watcher of the job: close
    it (aclosing) for the job's disconnect grace to begin.
    """
    pace = Pace(interval, after_seq=after_seq)
    seq, replayed = after_seq, job.last_seq
    with engine.watching(job):
        while True:
            backlog = job.entries[seq:]
            steps = [entry.seq for entry in backlog if isinstance(entry.event, StepProgress) and entry.seq > replayed]
            late = set(steps[:-1]) if len(steps) > MAX_BEHIND else ()
            for entry in backlog:
                seq = entry.seq
                if seq in late:
                    pace.skip()
                elif (update := pace.take(entry)) is not None:
                    yield update
            if job.state.terminal and seq == job.last_seq:
                return
            due = pace.due()
            held = due is not None and (heartbeat is None or due < heartbeat)
            if await job.wait(seq, due if held else heartbeat):
                continue
            yield pace.release() if held else None
