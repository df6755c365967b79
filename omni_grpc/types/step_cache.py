"""Step caches: what a request asks for, and what features report of a step. Plain frozen data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

K = TypeVar("K", bound=Hashable)


V = TypeVar("V", bound="Addable")


class Addable(Protocol):
    """A report that can be added to another of its kind."""

    def __add__(self, other: Self, /) -> Self: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeaCache:
    """The step cache of a request: reuse while the accumulated change stays under `rel_l1_thresh`. `coefficients` are
    the polynomial, highest power first, that turns a relative change of the signal into one of the output.
    """

    rel_l1_thresh: float
    coefficients: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FixedCache:
    """A step cache that every request runs under, and that the API has no options for."""

    name: str


def threshold_fault(value: Any) -> str:
    """What is wrong with a threshold of TeaCache, or ""."""
    if isinstance(value, int | float) and 0 <= value < math.inf:
        return ""
    return f"is {value!r}, expected a number of at least 0 (0 never reuses a step)"


def coefficients_fault(values: Sequence[Any]) -> str:
    """What is wrong with coefficients of TeaCache, or ""."""
    numbers = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )
    if not isinstance(values, str) and all(numbers):
        return ""
    shown = repr(values) if isinstance(values, str) else ", ".join(map(repr, values))
    return f"is {shown}, expected finite numbers, highest power first"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheDraft:
    """The step cache as requested: off, or on, with unset values left to the server."""

    off: bool = False
    rel_l1_thresh: float | None = None
    coefficients: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheCount:
    """What a step cache did in one component: row evaluations that it served and that were computed, and the sum of the
    `measured` relative changes that it decided by.
    """

    component: str
    hits: int = 0
    misses: int = 0
    measured: int = 0
    change: float = 0.0

    def __add__(self, other: CacheCount) -> CacheCount:
        return CacheCount(
            component=self.component,
            hits=self.hits + other.hits,
            misses=self.misses + other.misses,
            measured=self.measured + other.measured,
            change=self.change + other.change,
        )


def tally(reports: dict[K, V], key: K, report: V) -> None:
    """Adds a report to those of the same key."""
    reports[key] = reports[key] + report if key in reports else report


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReports:
    """What features tell of one step of a request: `rows_reused` of its rows were answered by a step cache in one
    evaluation or more, and `cache` counts all row evaluations, component by component.
    """

    rows_reused: int = 0
    cache: tuple[CacheCount, ...] = ()

    @classmethod
    def of(cls, reports: Mapping[tuple[int, str, str], Any]) -> StepReports:
        """From the sums of a step, by (output, feature, branch)."""
        counts = {key: report for key, report in reports.items() if isinstance(report, CacheCount)}
        cache: dict[str, CacheCount] = {}
        for count in counts.values():
            tally(cache, count.component, count)
        reused = {(output, branch) for (output, _, branch), count in counts.items() if count.hits}
        return cls(rows_reused=len(reused), cache=tuple(cache.values()))
