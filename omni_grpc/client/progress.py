"""Progress on stderr: a progress bar on a terminal, plain lines elsewhere. Used with a server and offline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from omni_grpc.client.extras import needs
from omni_grpc.types.events import (
    ArtifactReady,
    Cancelled,
    Completed,
    DecodeProgress,
    EncodeDone,
    Event,
    Failed,
    Preempted,
    Queued,
    Resumed,
    Retrying,
    Started,
    StepProgress,
)
from omni_grpc.types.results import RequestWarning
from omni_grpc.wire import arm

if TYPE_CHECKING:
    import rich.progress

Show = Callable[[Event | None], None]
"""Called with each event as it happens. None, an event of an unknown kind, is ignored."""

LINES = 10
"""The most lines printed for the steps of one job without a terminal."""


@contextlib.contextmanager
def progress_display(enabled: bool = True, stream: TextIO | None = None) -> Iterator[Show]:
    """Shows the progress of one job until the block is left. Shows nothing if `enabled` is False."""
    target = stream or sys.stderr
    if not enabled:
        yield lambda event: None
    elif target.isatty():
        with _bar(target) as bar:
            yield _ProgressBar(bar).show
    else:
        yield _ProgressLines(target).show


def describe(event: Event) -> str:
    """One readable line about an event."""
    match event:
        case Queued():
            return f"queued: {event.position} ahead of it"
        case Started():
            size = f"{event.width} x {event.height}, {event.total_steps} steps"
            return f"started: {event.model}, {size}, seeds {', '.join(map(str, event.seeds))}"
        case Retrying():
            why = event.failure.message
            return f"back in the queue for attempt {event.attempt} of {event.max_attempts}: {why}"
        case EncodeDone():
            return f"encoded: {event.prompt_tokens} tokens in {event.elapsed:.2f} s"
        case StepProgress():
            return f"step {event.step}/{event.total_steps}  {_pace(event)}"
        case Preempted():
            return f"preempted after {event.completed_steps} steps: {event.reason}, {event.position} ahead of it"
        case Resumed():
            return f"resumed after {event.completed_steps} steps, paused for {event.wait:.2f} s"
        case DecodeProgress():
            return f"decoding: {event.done_units}/{event.total_units}"
        case ArtifactReady():
            return f"output {event.artifact.index}: {event.artifact.artifact_id}, {event.artifact.size_bytes} bytes"
        case Completed():
            return f"done: {len(event.artifacts)} output(s) in {event.stats.total:.2f} s"
        case Failed():
            return f"failed: {event.failure.code} {event.failure.reason}: {event.failure.message}"
        case Cancelled():
            return f"cancelled after {event.completed_steps} steps: {event.reason}"
        case _:
            return _plain(event)


def _plain(event: Any) -> str:
    """The event's type and its fields, for events without a text of their own."""
    fields = (f"{field.name} {getattr(event, field.name)}" for field in dataclasses.fields(event))
    return f"{arm(event.__class__).replace('_', ' ')}: {', '.join(fields)}".removesuffix(": ")


def warning_line(warning: RequestWarning) -> str:
    return f"warning: {warning.code} {warning.field}: {warning.message}"


class _Warnings:
    """Warnings are sent with `started` and again at the end. `new` returns each of them once."""

    def __init__(self) -> None:
        self._seen: set[RequestWarning] = set()

    def new(self, event: Event) -> list[RequestWarning]:
        fresh = [w for w in getattr(event, "warnings", ()) if w not in self._seen]
        self._seen.update(fresh)
        return fresh


class _ProgressLines:
    """Prints a line for each event, and for every tenth of the steps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._warnings = _Warnings()
        self._shown = 0

    def show(self, event: Event | None) -> None:
        if event is None:
            return
        for warning in self._warnings.new(event):
            self._write(warning_line(warning))
        if isinstance(event, StepProgress):
            tenth = event.step * LINES // event.total_steps
            if event.step < event.total_steps and event.total_steps > LINES and tenth == self._shown:
                return
            self._shown = tenth
        self._write(describe(event))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class _ProgressBar:
    """A rich progress bar: phase, step n/total, seconds per step, time left."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("waiting", total=None, note="")
        self._warnings = _Warnings()

    def show(self, event: Event | None) -> None:
        if event is None:
            return
        for warning in self._warnings.new(event):
            self._bar.console.print(warning_line(warning), markup=False, highlight=False)
        match event:
            case Queued():
                self._set("queued", note=f"{event.position} ahead of it")
            case Started():
                self._set("encoding", total=event.total_steps, note=f"{event.width} x {event.height}")
            case Retrying():
                self._set("queued", note=f"retrying: {event.failure.message}")
            case EncodeDone():
                self._set("denoising", note="")
            case StepProgress():
                note = f"step {event.step}/{event.total_steps}  {_pace(event)}"
                self._set("denoising", completed=event.step, total=event.total_steps, note=note)
            case Preempted():
                self._set("preempted", note=f"{event.reason}, {event.position} ahead of it")
            case Resumed():
                self._set("denoising", note="")
            case DecodeProgress():
                self._set("decoding", note=f"{event.done_units}/{event.total_units}")
            case Completed():
                self._set("done", note=f"{len(event.artifacts)} output(s) in {event.stats.total:.2f} s")
            case Cancelled():
                self._set("cancelled", note=f"after {event.completed_steps} steps")
            case Failed():
                self._set("failed", note="")

    def _set(self, phase: str, *, note: str, total: float | None = None, completed: float | None = None) -> None:
        self._bar.update(self._task, description=phase, total=total, completed=completed, note=note)


def _bar(stream: TextIO) -> rich.progress.Progress:
    with needs("progress"):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(finished_style="green"),
        TextColumn("{task.fields[note]}", markup=False),
    )
    return Progress(*columns, console=Console(file=stream))


def _pace(event: StepProgress) -> str:
    left = "" if math.isnan(event.eta) else f"  {event.eta:.1f} s left"
    return f"{event.step_time:.3g} s/step{left}"
