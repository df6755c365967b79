"""The highest rate at which enough requests keep their objectives: doubling, then bisection."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable

MOST = 16
"""Runs of a search at most."""
LEAST = 1 / 64
"""Where this share of the first rate is still too much, the search gives up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """`rate`: the highest that was enough, None where none was. `above`: the lowest that was too much, None where the
    search ended before.
    """

    rate: float | None
    above: float | None


async def search(enough: Callable[[float], Awaitable[bool | None]], first: float, precision: float) -> Found:
    """`enough` runs at a rate and says whether that many requests are served as promised, None to end the search. The
    two rates of the result differ by at most the share `precision`, unless it ended before.
    """
    low: float | None = None
    high: float | None = None
    rate = first
    for _ in range(MOST):
        if (served := await enough(rate)) is None:
            break
        if served:
            low = rate
        else:
            high = rate
        if low is None:
            if rate < first * LEAST:
                break
            rate /= 2
        elif high is None:
            rate *= 2
        elif high <= low * (1 + precision):
            break
        else:
            rate = math.sqrt(low * high)
    return Found(low, high)
