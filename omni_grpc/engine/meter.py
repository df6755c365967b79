"""How far measured step times are from the predicted ones."""

from __future__ import annotations

WEIGHT = 0.1
"""Weight of the newest step in the running mean."""


class Meter:
    """A running mean of measured over predicted step time."""

    def __init__(self) -> None:
        self._planned_ms = 0.0
        self.cost_error = 1.0
        """Measured step time over predicted step time."""

    def planned(self, milliseconds: float) -> None:
        """A plan was sent whose step is predicted to take this long; 0 if it has no step."""
        if milliseconds:
            self._planned_ms = milliseconds

    def stepped(self, seconds: float) -> None:
        if self._planned_ms:
            self.cost_error += WEIGHT * (1000 * seconds / self._planned_ms - self.cost_error)
