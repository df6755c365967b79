"""How far measured step times are from the predicted ones, and how long the phases take that nobody predicts."""

from __future__ import annotations

from collections.abc import Sequence

WEIGHT = 0.1
"""Weight of the newest step in the running mean."""


MEMORY = 0.9
"""What a maximum keeps of itself with each newer value."""


class Peak:
    """The longest of late, in milliseconds."""

    def __init__(self) -> None:
        self.ms = 0.0

    def add(self, seconds: float) -> None:
        self.ms = max(1000 * seconds, MEMORY * self.ms)


class Mean:
    """A running mean; 0 before there is any value."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value += WEIGHT * (value - self.value) if self.value else value


class Meter:
    """A running mean of measured over predicted step time."""

    def __init__(self) -> None:
        self.planned_ms = 0.0
        """What the newest step was predicted to take; 0 before there was one."""
        self.planned_for: Sequence[str] = ()
        """The requests that share it."""
        self.cost_error = 1.0
        """Measured step time over predicted step time."""
        self.prepare, self.step, self.decode = Peak(), Peak(), Peak()
        self.step_time, self.step_jobs, self.step_rows = Mean(), Mean(), Mean()

    def planned(self, milliseconds: float, step: Sequence[str] = ()) -> None:
        """A plan was sent whose step is predicted to take this long, for these requests; 0 if it has no step."""
        if milliseconds:
            self.planned_ms = milliseconds
        if step:
            self.planned_for = step

    def stepped(self, seconds: float, *, jobs: int = 0, rows: int = 0) -> None:
        """A step is done, which so many jobs shared, with so many rows."""
        self.step.add(seconds)
        self.step_time.add(seconds)
        if jobs:
            self.step_jobs.add(jobs)
        if rows:
            self.step_rows.add(rows)
        if self.planned_ms:
            self.cost_error += WEIGHT * (1000 * seconds / self.planned_ms - self.cost_error)
