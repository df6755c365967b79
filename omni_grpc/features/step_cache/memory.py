"""What is kept of a row between evaluations, and what takes the place of the blocks that do not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from omni_grpc.features.step_cache.policies import Kept
from omni_grpc.nn.stack import Carry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One row after an evaluation.

    compared: [T, C], what the next evaluation is compared with; None where nothing is.
    residuals: what the blocks between head and tail added to each stream, newest first, each with the number of its
    evaluation. computed, reused, in_row, kept: see Moment and Policy.decide.
    """

    segment: int
    evaluation: int
    compared: Tensor | None
    residuals: tuple[tuple[int, Carry], ...]
    kept: Kept = ()
    computed: int = 0
    reused: int = 0
    in_row: int = 0


def forecast(residuals: Sequence[tuple[int, Carry]], evaluation: int) -> Carry:
    """The residual of an evaluation that is not computed: the polynomial through those of earlier ones, by the numbers
    of their evaluations. Of one, it is that one.

    Computed in the dtype of the residuals from the newest one on, as a sum of differences, so that one residual gives
    its own bits.
    """
    newest = residuals[0][1]
    if len(residuals) == 1:
        return newest
    weights = _weights([at for at, _ in residuals], evaluation)
    out: Carry = {}
    for name, x in newest.items():
        y = x
        for weight, (_, older) in zip(weights[1:], residuals[1:], strict=True):
            # the weights add up to 1
            y = y + (older[name] - x) * weight
        out[name] = y
    return out


def _weights(points: Sequence[int], at: int) -> list[float]:
    """Lagrange's: how much the value at each of these points counts for that of another one."""
    weights = []
    for point in points:
        weight = 1.0
        for other in points:
            if other != point:
                weight *= (at - other) / (point - other)
        weights.append(weight)
    return weights
