"""What a run does: which requests it sends, and when or how many at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The class of each request, in order, as many as there may be. In an open loop `times` says when each is sent, in
    seconds from the beginning; in a closed loop, where `concurrency` is set, so many run at any time, and the next one
    is sent when one has ended, until `seconds` have passed.
    """

    names: Iterable[str]
    times: Sequence[float] = ()
    concurrency: int | None = None
    seconds: float | None = None

    @property
    def offered(self) -> float | None:
        """Requests per second that were to be sent; None in a closed loop, and for a single request."""
        if self.concurrency is not None or len(self.times) < 2:
            return None
        return len(self.times) / (self.seconds or self.times[-1])
