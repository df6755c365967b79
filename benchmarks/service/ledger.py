"""What clients of a server were told of their jobs, and what a server that was started again must therefore say."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import Message

from omni_grpc.v1 import event_pb2, job_pb2, options_pb2

ENDED = (event_pb2.JOB_STATE_SUCCEEDED, event_pb2.JOB_STATE_FAILED, event_pb2.JOB_STATE_CANCELLED)
PROGRESS = ("step_progress", "decode_progress")
"""Events that are not kept."""
RESTARTED = "SERVER_RESTARTED"


@dataclasses.dataclass(eq=False)
class Known:
    """A job that was acknowledged. `events`: by seq, what a watcher has seen from the first one on; `ended`: the state
    in which it was seen to have ended. `asked` and `told`: what was asked for, and what its reply has confirmed.
    """

    job_id: str
    request: job_pb2.CreateJobRequest
    create_time: int
    events: dict[int, event_pb2.JobEvent] = dataclasses.field(default_factory=dict)
    ended: int | None = None
    artifacts: dict[str, bytes] = dataclasses.field(default_factory=dict)
    asked: set[str] = dataclasses.field(default_factory=set)
    told: set[str] = dataclasses.field(default_factory=set)
    downloaded: bool = False
    restarts: int = 0
    """Times that its server was lost while it ran, by its log."""

    @property
    def request_id(self) -> str:
        return _options(self.request).request_id

    @property
    def requeues(self) -> bool:
        return _options(self.request).on_server_restart == options_pb2.RESTART_POLICY_REQUEUE

    @property
    def last_seq(self) -> int:
        return max(self.events, default=0)

    @property
    def started(self) -> bool:
        """Whether it was seen to run, and not to wait again since."""
        kinds = [event.WhichOneof("event") for _, event in sorted(self.events.items())]
        return "started" in kinds[max((at for at, kind in enumerate(kinds) if kind == "retrying"), default=0) :]

    def see(self, event: event_pb2.JobEvent) -> str:
        """Keeps an event. Returns what is wrong with it, or "" ."""
        event = plain(event)
        before = self.events.setdefault(event.seq, event)
        if before != event:
            return f"{self.job_id}: seq {event.seq} was {_named(before)} and is {_named(event)}"
        if event.WhichOneof("event") in ("completed", "failed", "cancelled"):
            return self.see_end(state_of(event), list(event.completed.artifacts))
        return ""

    def see_end(self, state: int, artifacts: Sequence[Message]) -> str:
        """Keeps how it has ended. Returns what is wrong with that, or ""."""
        if self.ended not in (None, state):
            return f"{self.job_id}: had ended as {self.ended}, and is {state}"
        self.ended = state
        sums = {one.artifact_id: one.sha256 for one in artifacts}  # type: ignore[attr-defined]
        if self.artifacts and sums != self.artifacts:
            return f"{self.job_id}: has other outputs than it had"
        self.artifacts = sums
        return ""

    def replayed(self, log: Sequence[event_pb2.JobEvent]) -> Iterator[str]:
        """What is wrong with the log that a server has after a restart. From then on, it is what was seen."""
        last, found = self.last_seq, {event.seq: plain(event) for event in log}
        if [event.seq for event in log] != sorted(found):
            yield f"{self.job_id}: its log is not in order, or has a seq twice"
        for seq, event in found.items():
            seen = self.events.get(seq)
            if seen is not None and seen != event:
                yield f"{self.job_id}: seq {seq} was {_named(seen)} and is {_named(event)}"
            if seen is None and seq <= last and event.WhichOneof("event") not in PROGRESS:
                yield f"{self.job_id}: {_named(event)} came between what had been seen, at {seq} of {last}"
        for seq, event in self.events.items():
            if event.WhichOneof("event") not in PROGRESS and seq not in found:
                yield f"{self.job_id}: {_named(event)} at {seq} was seen and is not kept"
        self.events |= found
        lost = sum(event.WhichOneof("event") == "retrying" and _lost(event.retrying.status) for event in found.values())
        self.restarts = lost


class Ledger:
    """All that is known, shared by the threads of clients."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jobs: dict[str, Known] = {}
        self.unanswered: list[job_pb2.CreateJobRequest] = []
        """Creates with a request_id whose reply did not come."""
        self.assets: dict[str, bytes] = {}
        self.problems: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def acknowledge(self, request: job_pb2.CreateJobRequest, response: job_pb2.CreateJobResponse) -> Known:
        job = response.job
        with self.lock:
            known = self.jobs.get(job.job_id)
            if known is None:
                self.counts["acknowledged"] += 1
                known = Known(job.job_id, request, job.create_time.ToNanoseconds())
                self.jobs[job.job_id] = known
        return known

    def report(self, problem: str) -> None:
        if problem:
            with self.lock:
                self.problems.append(problem)

    def some(self, fits: Callable[[Known], bool]) -> list[Known]:
        """The jobs that fit, oldest first."""
        with self.lock:
            return [known for known in self.jobs.values() if fits(known)]


def plain(event: event_pb2.JobEvent) -> event_pb2.JobEvent:
    """Without what is of one watcher, and not of the event."""
    copy = event_pb2.JobEvent()
    copy.CopyFrom(event)
    copy.ClearField("coalesced")
    return copy


def state_of(event: event_pb2.JobEvent) -> int:
    return {
        "completed": event_pb2.JOB_STATE_SUCCEEDED,
        "failed": event_pb2.JOB_STATE_FAILED,
        "cancelled": event_pb2.JOB_STATE_CANCELLED,
    }[event.WhichOneof("event") or ""]


def was_lost(job: job_pb2.Job) -> bool:
    """Whether it failed because its server was lost."""
    return job.state == event_pb2.JOB_STATE_FAILED and _lost(job.error)


def _lost(status: Message) -> bool:
    return any(RESTARTED.encode() in detail.value for detail in status.details)  # type: ignore[attr-defined]


def _options(request: job_pb2.CreateJobRequest) -> options_pb2.JobOptions:
    options: options_pb2.JobOptions = getattr(request, request.WhichOneof("task") or "").options
    return options


def _named(event: event_pb2.JobEvent) -> str:
    return f"{event.WhichOneof('event')} ({' '.join(str(event).split())[:300]})"
