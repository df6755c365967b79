"""When a webhook that was not delivered is tried again, and when no more."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Times in seconds. The pause after attempt n is `first` x `factor`^(n - 1), at most `longest`, and by up to
    `jitter` of itself shorter or longer, so that what failed together is not tried together.

    There are at most `attempts`, the last one at most `span` after the state that is told of. A receiver that asks for
    a longer pause gets it, up to `longest_asked`.

    The default is 11 attempts: after 5 s, 15 s, 45 s, 2 min, 7 min, 20 min, 1 h, 3 h, 6 h and 6 h, some 17 hours in
    all.
    """

    first: float = 5.0
    factor: float = 3.0
    longest: float = 6 * 3600.0
    jitter: float = 0.2
    attempts: int = 11
    span: float = 24 * 3600.0
    longest_asked: float = 3600.0

    def pause(self, attempts: int) -> float:
        """The pause after so many attempts, from 1, without its jitter."""
        # the exponent is bounded, since a float is
        return min(self.longest, self.first * self.factor ** min(attempts - 1, 64))

    def due(
        self, attempts: int, *, created: float, now: float, chance: float, retry_after: float | None = None
    ) -> float | None:
        """When the next attempt is due, after so many that failed; None: there is none. `created` and `now` are in Unix
        seconds, `chance` is from 0 to 1.
        """
        if attempts >= self.attempts:
            return None
        pause = self.pause(attempts) * (1 + self.jitter * (2 * chance - 1))
        if retry_after is not None:
            pause = max(pause, min(retry_after, self.longest_asked))
        due = now + pause
        return None if due > created + self.span else due
