"""How far steps are from what was predicted for them."""

from __future__ import annotations

WEIGHT = 0.1
"""Weight of the newest step in the running mean."""


class Meter:
    """A running mean over the last steps. A step was planned with a prediction and reported with the time it took."""

    def __init__(self) -> None:
        self._planned_ms = 0.0
        self.cost_error = 1.0
        """Time that steps took over the time that was predicted for them."""

    def planned(self, milliseconds: float) -> None:
        """A step was sent off; 0 where the plan has none."""
        if milliseconds:
            self._planned_ms = milliseconds

    def stepped(self, seconds: float) -> None:
        if self._planned_ms:
            self.cost_error += WEIGHT * (1000 * seconds / self._planned_ms - self.cost_error)
