"""Least squares whose coefficients are not negative: more of anything never takes less."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LARGE = 4
"""A value is large that is more than such a part of the largest one."""


def nonnegative(
    features: Sequence[Sequence[float]], values: Sequence[float], *, weights: Sequence[float]
) -> tuple[float, ...]:
    """Coefficients c >= 0 for which sum(c * features) is near each value; the error of each counts by its weight.

    Where the free solution has negative coefficients, the most negative one is dropped and the rest are solved again.
    """
    weighted = np.array(features, dtype=float) * np.array(weights)[:, None]
    target = np.array(values, dtype=float) * np.array(weights)
    # columns differ by many orders of magnitude
    scale = np.abs(weighted).max(axis=0)
    kept = [index for index, most in enumerate(scale) if most > 0]
    coefficients = np.zeros(weighted.shape[1])
    while kept:
        solution, *_ = np.linalg.lstsq(weighted[:, kept] / scale[kept], target, rcond=None)
        if (solution >= 0).all():
            coefficients[kept] = solution / scale[kept]
            break
        del kept[int(np.argmin(solution))]
    return tuple(coefficients.tolist())


def upper(features: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """The same for what must not be too low: large values count more than small ones. The result is so many times
    larger that it is below no large value, and its first coefficient, that of what is always there, so much larger that
    it is below no small one.
    """
    if not values or max(values) <= 0:
        return (0.0,) * (len(features[0]) if features else 0)
    # no more than a hundredth of the largest is what small ones may be wrong by
    weights = [max(value, max(values) / 100) ** -0.5 for value in values]
    coefficients = nonnegative(features, values, weights=weights)
    guesses = _predicted(features, coefficients)
    large = [(value, guess) for value, guess in zip(values, guesses, strict=True) if value >= max(values) / LARGE]
    times = max([1.0, *(value / guess for value, guess in large if guess > 0)])
    first, *others = (times * c for c in coefficients)
    guesses = _predicted(features, (first, *others))
    short = max((value - guess) / row[0] for value, guess, row in zip(values, guesses, features, strict=True))
    return (first + max(0.0, short), *others)


def _predicted(features: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    return [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in features]
