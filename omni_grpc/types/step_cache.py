"""Step caches: what a request asks for, and what features report of a step. Plain frozen data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping
from typing import Any, Protocol, Self, TypeVar

K = TypeVar("K", bound=Hashable)


V = TypeVar("V", bound="Addable")


class Addable(Protocol):
    """A report that can be added to another of its kind."""

    def __add__(self, other: Self, /) -> Self: ...


INPUT, TIMESTEP = "input", "timestep"
"""What TeaCache compares: the first modulated input of the blocks, or the modulation that the timestep alone gives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeaCache:
    """Reuse while the accumulated change of `signal` stays under `rel_l1_thresh`. `coefficients` are the polynomial,
    highest power first, that turns a relative change of the signal into one of the output. At most
    `max_continuous_cached_steps` steps in a row are reused; 0: no limit.
    """

    rel_l1_thresh: float
    coefficients: tuple[float, ...]
    max_continuous_cached_steps: int = 0
    signal: str = INPUT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstBlockCache:
    """Reuse while what the first block adds has changed by `threshold` at most since the blocks last ran."""

    threshold: float
    max_continuous_cached_steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DbCache:
    """DBCache with TaylorSeer and a step mask: the first `fn_compute_blocks` and the last `bn_compute_blocks` always
    run; those between are skipped while what the first ones add has changed by less than `residual_diff_threshold`
    since they last ran. Limits of 0 are none. `scm_steps_mask` has an entry per step, true where the step is computed.
    """

    fn_compute_blocks: int
    bn_compute_blocks: int
    max_warmup_steps: int
    residual_diff_threshold: float
    max_continuous_cached_steps: int
    max_cached_steps: int
    taylorseer_order: int
    cfg_diff_compute_separate: bool
    scm_steps_mask_policy: str = ""
    scm_steps_policy: str = "dynamic"
    scm_steps_mask: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MagCache:
    """Reuse along `ratios`, the quotients of the residual's magnitude from one step to the next, measured for the model
    beforehand: at most `max_skip_steps` steps in a row, while the error that they let expect stays within `threshold`,
    after a share of `retention_ratio` of the steps.
    """

    threshold: float
    max_skip_steps: int
    retention_ratio: float
    ratios: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeaCache:
    """Reuse while the accumulated change of the input, filtered by the spectrum that a picture of this noise level has,
    stays under `threshold`; what is reused is extrapolated by a polynomial of `residual_order`.
    """

    threshold: float
    residual_order: int
    max_consecutive_cached: int
    power_exp: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """No cache: every evaluation is computed, and an Observation tells what caches would have gone by."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One evaluation of one row against the one before. `change`: of the blocks' first input; `timestep`: of the
    modulation that depends on the timestep alone; `output`: of what comes out of the blocks; each relative, in the L1
    norm. `ratio`: the magnitude of what the blocks add / that of before, the mean over the tokens.
    """

    branch: str
    evaluation: int
    change: float
    timestep: float
    output: float
    ratio: float


RequestCache = TeaCache | FirstBlockCache | DbCache | MagCache | SeaCache | Calibration
"""The step cache of a request."""

METHODS: Mapping[str, type[RequestCache]] = {
    "tea_cache": TeaCache,
    "first_block": FirstBlockCache,
    "cache_dit": DbCache,
    "mag_cache": MagCache,
    "sea_cache": SeaCache,
}
"""The step caches of native models, by the names that the API, the settings and the replies have for them."""


CALIBRATE = "calibrate"
"""The backend that observes for `omni-grpc calibrate`. It is no method: the API does not have it."""


def method_of(cache: RequestCache) -> str:
    """The name of a cache's method."""
    return next((name for name, record in METHODS.items() if type(cache) is record), CALIBRATE)


class CacheQuality(enum.StrEnum):
    """How much a step cache may change a result: measured for each model, see docs/step-cache.md."""

    NEAR_LOSSLESS = "NEAR_LOSSLESS"
    BALANCED = "BALANCED"
    FAST = "FAST"


@dataclasses.dataclass(frozen=True, slots=True)
class FixedCache:
    """A step cache that every request runs under, and that the API has no options for."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheDraft:
    """The step cache as requested: off; a method by its name, with those of its fields that were `given`; or a quality.
    Neither: the server's own.
    """

    off: bool = False
    method: str = ""
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quality: CacheQuality | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheCount:
    """What a step cache did in one component: row evaluations that it served (`hits`) and that were computed
    (`misses`), the blocks that they have together and those of them that ran, and the sum of the `measured` relative
    changes that it decided by. `observed`: of a Calibration, what it saw.
    """

    component: str
    method: str = ""
    hits: int = 0
    misses: int = 0
    blocks: int = 0
    blocks_run: int = 0
    measured: int = 0
    change: float = 0.0
    observed: tuple[Observation, ...] = ()

    def __add__(self, other: CacheCount) -> CacheCount:
        return CacheCount(
            component=self.component,
            method=self.method,
            hits=self.hits + other.hits,
            misses=self.misses + other.misses,
            blocks=self.blocks + other.blocks,
            blocks_run=self.blocks_run + other.blocks_run,
            measured=self.measured + other.measured,
            change=self.change + other.change,
            observed=self.observed + other.observed,
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
