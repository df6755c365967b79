"""What runs next. Pure Python: it sees ids and phases, never tensors, time or events.

A job waits, is prepared, takes steps with the other running jobs, is decoded, and is gone. Each phase has one lane in
the worker; a lane is busy from the plan that fills it to the report that frees it, so that a long encode or decode
never holds up the steps of the others.
"""

from __future__ import annotations

import enum
from collections import deque

from omni_grpc.errors import ResourceExhausted
from omni_grpc.plan import Plan
from omni_grpc.request import Request


class Phase(enum.StrEnum):
    WAITING = "WAITING"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    DECODE_QUEUED = "DECODE_QUEUED"
    DECODING = "DECODING"


class Lane(enum.StrEnum):
    """A line of work in the worker that does one thing at a time."""

    PREPARE = "prepare"
    STEP = "step"
    DECODE = "decode"


class Scheduler:
    """First come, first served. Every job it holds is in exactly one phase."""

    def __init__(self, max_queue: int, max_num_seqs: int) -> None:
        self.max_queue = max_queue
        self.max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._phase: dict[str, Phase] = {}
        self._busy: set[Lane] = set()
        self._dropped: list[str] = []

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._phase

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Jobs that have left the queue and are not gone."""
        return len(self._phase) - len(self._waiting)

    def position(self, job_id: str) -> int:
        """Jobs before this one in the queue; 0 for a job that has left it."""
        return next((i for i, request in enumerate(self._waiting) if request.id == job_id), 0)

    def phase(self, job_id: str) -> Phase:
        return self._phase[job_id]

    def add(self, request: Request) -> None:
        """Puts a job at the end of the queue. Raises ResourceExhausted (QUEUE_FULL) where there is no room."""
        if len(self._waiting) >= self.max_queue:
            raise ResourceExhausted(
                f"{self.max_queue} jobs are waiting, the most this server keeps; retry later",
                reason="QUEUE_FULL",
                retry_after=1.0,
            )
        self._waiting.append(request)
        self._phase[request.id] = Phase.WAITING

    def plan(self) -> Plan:
        """What every free lane does now. The lanes it fills are busy until `free`."""
        admit: tuple[Request, ...] = ()
        in_flight = sum(phase in (Phase.PREPARING, Phase.RUNNING) for phase in self._phase.values())
        if self._waiting and Lane.PREPARE not in self._busy and in_flight < self.max_num_seqs:
            admit = (self._waiting.popleft(),)
            self._phase[admit[0].id] = Phase.PREPARING
            self._busy.add(Lane.PREPARE)
        step = self._ids(Phase.RUNNING) if Lane.STEP not in self._busy else ()
        if step:
            self._busy.add(Lane.STEP)
        decode = self._ids(Phase.DECODE_QUEUED)[:1] if Lane.DECODE not in self._busy else ()
        for job_id in decode:
            self._phase[job_id] = Phase.DECODING
            self._busy.add(Lane.DECODE)
        dropped, self._dropped = tuple(self._dropped), []
        return Plan(admit=admit, step=step, decode=decode, drop=dropped)

    def free(self, lane: Lane) -> None:
        """The worker reported: its lane can take more."""
        self._busy.remove(lane)

    def move(self, job_id: str, phase: Phase) -> None:
        """A job enters the next phase. One that was removed meanwhile stays away."""
        if job_id in self._phase:
            self._phase[job_id] = phase

    def finish(self, job_id: str) -> None:
        """A job is over in the worker too: it ended, or broke and was forgotten there."""
        self._phase.pop(job_id, None)

    def remove(self, job_id: str) -> Phase:
        """Takes a job out and returns its phase. The next plan tells the worker to drop what it holds."""
        phase = self._phase.pop(job_id)
        if phase is Phase.WAITING:
            self._waiting = deque(request for request in self._waiting if request.id != job_id)
        else:
            self._dropped.append(job_id)
        return phase

    def reset(self) -> list[str]:
        """The worker is gone: no lane is busy, and every job it held is returned and forgotten."""
        lost = [job_id for job_id, phase in self._phase.items() if phase is not Phase.WAITING]
        for job_id in lost:
            del self._phase[job_id]
        self._busy.clear()
        self._dropped.clear()
        return lost

    def _ids(self, phase: Phase) -> tuple[str, ...]:
        return tuple(job_id for job_id, its in self._phase.items() if its is phase)
