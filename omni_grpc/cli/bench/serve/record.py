"""What became of one request, filled in while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_grpc.types.errors import Failure
from omni_grpc.v1.event_pb2 import JobEvent

SUCCEEDED, FAILED, INTERRUPTED = "succeeded", "failed", "interrupted"


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """Times are seconds from the beginning of the run, None for what did not come.

    `scheduled`: when it was to be sent, and `sent`: when it was. `gaps`: seconds between two step events. `retries`:
    how often it was sent again, since there was no room; `resumes`: how often its stream was taken up again after the
    connection was lost; `coalesced`: step events that the server left out. `sharing`: jobs that shared its steps when
    it started. `queue_wait`: as the server says. `outcome` is empty while it runs; `code` and `reason` say why it
    failed.
    """

    number: int
    klass: str
    scheduled: float
    sent: float | None = None
    first_event: float | None = None
    queued: float | None = None
    started: float | None = None
    first_step: float | None = None
    first_preview: float | None = None
    last_step: float | None = None
    ended: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    queue_wait: float | None = None
    sharing: int = 0
    rows: int = 0
    retries: int = 0
    resumes: int = 0
    coalesced: int = 0
    outcome: str = ""
    code: str = ""
    reason: str = ""
    job_id: str = ""

    @property
    def succeeded(self) -> bool:
        return self.outcome == SUCCEEDED

    @property
    def late(self) -> float:
        """Seconds that the client sent it after it was to be sent."""
        return 0.0 if self.sent is None else self.sent - self.scheduled

    def see(self, event: JobEvent, now: float) -> None:
        """Notes an event that came at `now`."""
        self.job_id = event.job_id
        if self.first_event is None:
            self.first_event = now
        self.coalesced += event.coalesced
        match event.WhichOneof("event"):
            case "queued":
                self.queued = now if self.queued is None else self.queued
            case "started":
                self.started = now if self.started is None else self.started
                self.queue_wait = event.started.queue_wait.ToNanoseconds() / 1e9
                self.sharing = event.started.batch_size
            case "step_progress":
                self._step(event, now)
            case "completed":
                self._end(now, SUCCEEDED)

    def fail(self, failure: Failure, now: float) -> None:
        """The request was refused, or its job ended without outputs."""
        self._end(now, FAILED)
        self.code, self.reason = str(failure.code), failure.reason

    def interrupt(self, now: float) -> None:
        """The run was ended before the request was."""
        self._end(now, INTERRUPTED)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times with microseconds, and only what is not empty."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        return {name: _rounded(value) for name, value in found.items() if value != _EMPTY.get(name)}

    def _step(self, event: JobEvent, now: float) -> None:
        if self.last_step is None:
            self.first_step = now
        else:
            self.gaps.append(now - self.last_step)
        self.last_step = now
        self.rows = event.step_progress.rows_total
        if event.step_progress.previews and self.first_preview is None:
            self.first_preview = now

    def _end(self, now: float, outcome: str) -> None:
        self.ended, self.outcome, self.rows = now, outcome, 0


_EMPTY: Mapping[str, Any] = {
    "gaps": [],
    **dict.fromkeys(("sharing", "retries", "resumes", "coalesced"), 0),
    **dict.fromkeys(("outcome", "code", "reason", "job_id"), ""),
}
"""What a field holds that is not told; of the others it is None."""


def read(content: Any) -> Record:
    """The record that `as_dict` gave. Raises TypeError for anything else."""
    return Record(**content)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [round(item, 6) for item in value] if isinstance(value, list) else value
