"""How fast a job stops, in each phase: from the call of CancelJob to its reply, and to the end of the job's stream.

A cancel does not cut short what the worker is doing at that moment: an encode, a forward or a decode that is under way
ends first. The time until the next job is done shows what that costs others.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_grpc.client import Client, ImageOptions, JobStream
from omni_grpc.v1.job_pb2 import Job

from .arrivals import STEP, Arrival, arrival
from .report import Result, spread
from .server import PATIENCE, Server, served

PROMPT = "a red circle "
NEXT = ImageOptions(width=64, height=64, steps=1)
"""The job after a cancelled one: it goes through every lane of the worker."""


LONG = ImageOptions(width=512, height=512, steps=200)
"""A job that holds the only place for as long as it is let."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A phase: the event that tells that a job is in it, a job that stays there long enough, and when to cancel it."""

    trigger: str
    options: ImageOptions
    prompt_repeats: int = 1
    after: float = 0.1
    """Seconds from the trigger to the cancel, so that the phase is under way."""
    blocked: bool = False
    """Whether another job holds the only place, so that this one waits."""


CASES: Mapping[str, Case] = {
    "queue": Case(trigger="queued", options=ImageOptions(width=64, height=64, steps=4), blocked=True),
    "encode": Case(trigger="started", options=ImageOptions(width=64, height=64, steps=4), prompt_repeats=60_000),
    "step": Case(trigger=STEP, options=ImageOptions(width=1024, height=1024, steps=50), after=0.02),
    "decode": Case(trigger="decode_progress", options=ImageOptions(width=1024, height=1024, steps=1)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    repeats: int = 5
    cases: Mapping[str, Case] = dataclasses.field(default_factory=lambda: CASES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """Seconds from the call of CancelJob. `late_steps` counts step events made after the reply; `phase` is the
    last event but the terminal one: where the job was.
    """

    reply: float
    terminal: float
    ended: str
    phase: str
    late_steps: int
    next_done: float


def run(checkpoint: Path) -> Result:
    with served(checkpoint, "--max-num-seqs", "1", "--max-prompt-chars", "1000000") as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    with Client(server.address) as client:
        stops = {phase: [_stop(client, case) for _ in range(numbers.repeats)] for phase, case in numbers.cases.items()}
    return _result(numbers, stops)


class Reader:
    """Reads a stream in a thread of its own, so that each event is noted when it comes."""

    def __init__(self, stream: JobStream) -> None:
        self.arrivals: list[Arrival] = []
        self._stream = stream
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self, kind: str) -> None:
        """Returns when an event of that kind is there."""
        with self._changed:
            if not self._changed.wait_for(lambda: any(one.kind == kind for one in self.arrivals), PATIENCE):
                raise TimeoutError(f"no {kind} event within {PATIENCE:.0f} s")

    def end(self) -> list[Arrival]:
        """Every event, once the stream has ended."""
        self._thread.join(PATIENCE)
        return self.arrivals

    def _read(self) -> None:
        for event in self._stream:
            with self._changed:
                self.arrivals.append(arrival(event))
                self._changed.notify_all()


def _stop(client: Client, case: Case) -> Stop:
    blocker = client.create_job(PROMPT, **LONG) if case.blocked else None
    job = _create(client, case)
    reader = Reader(client.watch_job(job.job_id, timeout=PATIENCE))
    reader.wait(case.trigger)
    time.sleep(case.after)
    called = time.time()
    client.cancel_job(job.job_id, "measured")
    replied = time.time()
    arrivals = reader.end()
    if blocker is not None:
        client.cancel_job(blocker.job_id)
    following = client.generate_image(PROMPT, timeout=PATIENCE, **NEXT)
    return Stop(
        reply=replied - called,
        terminal=arrivals[-1].arrived - called,
        ended=arrivals[-1].kind,
        phase=arrivals[-2].kind,
        # by the server's time stamp: when the reader's thread gets to run is not the server's doing
        late_steps=sum(one.kind == STEP and one.sent > replied for one in arrivals),
        next_done=client.get_job(following.job_id).end_time.ToNanoseconds() / 1e9 - called,
    )


def _create(client: Client, case: Case) -> Job:
    return client.create_job(PROMPT * case.prompt_repeats, **case.options)


def _result(numbers: Numbers, stops: Mapping[str, list[Stop]]) -> Result:
    rows, problems = [], []
    figures: dict[str, Any] = {}
    for phase, its in stops.items():
        trigger = numbers.cases[phase].trigger
        late = sum(stop.late_steps for stop in its)
        elsewhere = [stop.phase for stop in its if stop.phase != trigger]
        rows.append(
            (
                phase,
                spread([1000 * stop.reply for stop in its], "ms", 2),
                spread([1000 * stop.terminal for stop in its], "ms", 2),
                str(late),
                spread([stop.next_done for stop in its], "s", 2),
            )
        )
        figures[phase] = {
            "reply_ms": [1000 * stop.reply for stop in its],
            "terminal_ms": [1000 * stop.terminal for stop in its],
            "median_reply_ms": 1000 * statistics.median(stop.reply for stop in its),
            "step_events_after_reply": late,
            "next_job_done_s": [stop.next_done for stop in its],
            "cancelled_elsewhere": elsewhere,
        }
        if late:
            problems.append(f"{phase}: {late} step events came after the reply")
        if elsewhere:
            problems.append(f"{phase}: the job was past it when it was cancelled, at {elsewhere}")
        problems += [f"{phase}: a job ended with {stop.ended}" for stop in its if stop.ended != "cancelled"]
    return Result(
        columns=("cancelled in", "reply", "end of the stream", "step events after the reply", "next job done"),
        rows=rows,
        figures=figures,
        problems=problems,
    )
