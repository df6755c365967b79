"""Follows a job through its event log. Each follower has its own position and pace; the engine waits for none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from omni_grpc.engine import Entry, Job
from omni_grpc.fleet import Fleet
from omni_grpc.store.records import Cause
from omni_grpc.types.errors import NotFound, OutOfRange, Unavailable
from omni_grpc.types.events import DecodeProgress, StepProgress

MAX_BEHIND = 8
"""Steps that a follower may lag behind before the ones in between are skipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A log entry as one follower receives it. `after` is the seq of the entry that it received before, or its cursor;
    `coalesced` counts the progress entries in between, skipped or not kept: their seqs were never another entry's.
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

    def take(self, entry: Entry) -> Update | None:
        """The update to send for this entry; None: nothing yet."""
        # what was held back is overtaken
        self._held = None
        if self._interval and _can_wait(entry):
            if self._clock() < self._next:
                self._held = entry
                return None
            self._next = self._clock() + self._interval
        return self._send(entry)

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
        update = Update(entry, self._after, entry.seq - self._after - 1)
        self._after = entry.seq
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
    # what was seen before a restart may be beyond what is kept
    if after_seq > job.appended_seq:
        raise OutOfRange(
            f"after_seq is {after_seq}, but job {job.id} is at {job.last_seq}; continue from Job.last_seq (GetJob)",
            reason="AFTER_SEQ_OUT_OF_RANGE",
            metadata={"job_id": job.id, "last_seq": str(job.last_seq)},
        )
    return after_seq


def left_behind(job: Job) -> Unavailable:
    """The end of a stream whose job is kept, and goes on once a server has it again."""
    return Unavailable(
        f"this server stops; job {job.id} is kept and goes on with the next one: watch it again",
        reason="SERVER_STOPPED",
        retry_after=1.0,
        metadata={"job_id": job.id},
    )


def deleted(job: Job) -> NotFound:
    """The end of a stream whose job was deleted before its end arrived here."""
    return NotFound(
        f"job {job.id!r} was deleted while it was watched",
        reason="JOB_NOT_FOUND",
        metadata={"name": job.id, "cause": Cause.DELETED.value},
    )


Told = Callable[[Update, float | None], None]
"""Is told of an update that is handed to a follower, with the seconds since its event; None for one that was there
before it followed, or that its own pace has held back.
"""


async def follow(
    fleet: Fleet, job: Job, after_seq: int, *, interval: float, heartbeat: float | None, told: Sequence[Told] = ()
) -> AsyncGenerator[Update | None]:
    """The entries of a job with a greater seq, to its end; None after every `heartbeat` seconds of silence.

    What is there when it begins comes whole. Afterwards a follower that falls more than MAX_BEHIND steps behind gets
    the newest of them alone; other entries are never left out. While this runs it counts as a watcher of the job: close
    it (aclosing) for the job's disconnect grace to begin. What `told` has must not raise.
    """
    pace = Pace(interval, after_seq=after_seq)
    seq, replayed = after_seq, job.last_seq
    with fleet.watching(job):
        while True:
            backlog = job.after(seq)
            steps = [entry.seq for entry in backlog if isinstance(entry.event, StepProgress) and entry.seq > replayed]
            late = set(steps[:-1]) if len(steps) > MAX_BEHIND else ()
            for entry in backlog:
                seq = entry.seq
                # those that it was too slow for are counted with the next one
                if seq not in late and (update := pace.take(entry)) is not None:
                    for tell in told:
                        tell(update, fleet.storage.clock() - entry.time if seq > replayed else None)
                    yield update
            if job.state.terminal and seq == job.last_seq:
                return
            if job.gone and seq == job.last_seq:
                raise deleted(job)
            if job.released and seq == job.last_seq:
                raise left_behind(job)
            due = pace.due()
            held = due is not None and (heartbeat is None or due < heartbeat)
            if await job.wait(seq, due if held else heartbeat):
                continue
            released = pace.release() if held else None
            if released is not None:
                for tell in told:
                    tell(released, None)
            yield released
