"""Step masks (SCM of cache-dit, https://github.com/vipshop/cache-dit): which steps are computed, whatever changes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

MASKS: Mapping[str, str] = {
    "slow": "1111111101110011100110010001",
    "medium": "1111110110001100011000110001",
    "fast": "1111110100010000100000100001",
    "ultra": "1111001000001000000100000001",
}
"""cache-dit's masks of 28 steps, by name: 18, 15, 11 and 8 steps are computed."""

SHORT: Mapping[int, Mapping[str, str]] = {
    4: dict.fromkeys(MASKS, "1101"),
    6: dict.fromkeys(MASKS, "111001"),
    8: {"slow": "11111011", "medium": "11110101", "fast": "11101001", "ultra": "11001001"},
    9: {"slow": "111110111", "medium": "111110101", "fast": "111101001", "ultra": "111001001"},
}
"""Its masks for models that take few steps."""

FEWEST = 8
"""Steps from which on every number has a mask."""


def steps_mask(name: str, steps: int) -> tuple[bool, ...]:
    """The mask of this name for so many steps: that of 28 steps, whose runs of steps are scaled.

    Raises ValueError for a number of steps that has none.
    """
    if steps in SHORT:
        return _parsed(SHORT[steps][name])
    if steps < FEWEST:
        known = ", ".join(str(few) for few in SHORT if few < FEWEST)
        raise ValueError(f"there is no step mask for {steps} steps; there is one for {known}, and from {FEWEST} on")
    mask = _parsed(MASKS[name])
    return mask if steps == len(mask) else _scaled(mask, steps)


def _parsed(text: str) -> tuple[bool, ...]:
    return tuple(step == "1" for step in text)


def _scaled(mask: Sequence[bool], steps: int) -> tuple[bool, ...]:
    """The same mask over another number of steps: each run of computed steps is as long in proportion, but has one step
    at least, so that what lies between two of them gets no longer than that.
    """
    scale = steps / len(mask)
    out = [False] * steps
    end = 0
    for computed, run in itertools.groupby(mask):
        start, end = end, end + len(list(run))
        if computed:
            first = min(round(start * scale), steps - 1)
            last = max(first + 1, round(end * scale))
            out[first:last] = [True] * (last - first)
    return tuple(out)
