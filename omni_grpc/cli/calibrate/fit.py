"""From what was observed of computed steps to what step caches go by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from omni_grpc.types.step_cache import INPUT, TIMESTEP, Observation

DEGREE = 4
"""Of TeaCache's polynomials."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """TeaCache's polynomial for one signal, highest power first. `explained` is the share of the variance of the
    output's changes that it explains (R^2); `lowest`, its least value over the changes that were seen.
    """

    signal: str
    coefficients: tuple[float, ...]
    explained: float
    lowest: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """MagCache's ratios, one for each evaluation, the first of which is 1, and how far those of single requests and
    branches are from them: the standard deviation.
    """

    ratios: tuple[float, ...]
    spread: tuple[float, ...]


def polynomial(observed: Sequence[Observation], signal: str) -> Fit:
    """Fits the output's changes to those of a signal by least squares."""
    changes = np.array([each.change if signal == INPUT else each.timestep for each in observed])
    outputs = np.array([each.output for each in observed])
    # of few distinct changes, no more terms than they determine
    degree = min(DEGREE, len(np.unique(changes.round(12))) - 1)
    coefficients = np.polyfit(changes, outputs, degree)
    foretold = np.polyval(coefficients, changes)
    variance = float(((outputs - outputs.mean()) ** 2).sum())
    missed = float(((outputs - foretold) ** 2).sum())
    over = np.polyval(coefficients, np.linspace(changes.min(), changes.max(), 200))
    return Fit(
        signal=signal,
        coefficients=tuple(map(float, coefficients)),
        explained=1.0 - missed / variance if variance else 0.0,
        lowest=float(over.min()),
    )


def better(observed: Sequence[Observation]) -> Fit:
    """The polynomial of the signal that explains more."""
    return max((polynomial(observed, signal) for signal in (INPUT, TIMESTEP)), key=lambda fit: fit.explained)


def curve(observed: Sequence[Observation]) -> Curve:
    """The mean ratio of each evaluation, over requests and branches."""
    by_evaluation: dict[int, list[float]] = {}
    for each in observed:
        by_evaluation.setdefault(each.evaluation, []).append(each.ratio)
    last = max(by_evaluation)
    means = [1.0] + [float(np.mean(by_evaluation[evaluation])) for evaluation in range(1, last + 1)]
    spread = [0.0] + [float(np.std(by_evaluation[evaluation])) for evaluation in range(1, last + 1)]
    return Curve(ratios=tuple(means), spread=tuple(spread))
