"""How far measured step times are from the predicted ones, and how long the phases take that nobody predicts."""

from __future__ import annotations

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


class Meter:
    """A running mean of measured over predicted step time."""

    def __init__(self) -> None:
        self._planned_ms = 0.0
        self.cost_error = 1.0
        """Measured step time over predicted step time."""
        self.prepare, self.step, self.decode = Peak(), Peak(), Peak()

    def planned(self, milliseconds: float) -> None:
        """A plan was sent whose step is predicted to take this long; 0 if it has no step."""
        if milliseconds:
            self._planned_ms = milliseconds

    def stepped(self, seconds: float) -> None:
        self.step.add(seconds)
        if self._planned_ms:
            self.cost_error += WEIGHT * (1000 * seconds / self._planned_ms - self.cost_error)
