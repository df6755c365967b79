"""Who decides: for each method, when the blocks of a row may be skipped. A policy looks at numbers alone, keeps what it
needs in a few floats of the row's memory, and knows nothing of tensors.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from omni_grpc.types.step_cache import (
    TIMESTEP,
    Calibration,
    DbCache,
    FirstBlockCache,
    MagCache,
    RequestCache,
    SeaCache,
    TeaCache,
)

Kept = tuple[float, ...]


class Compared(enum.Enum):
    """What is compared with an earlier evaluation: nothing; the first modulated input, as it is or FILTERED; the
    modulation that the timestep gives; what the first blocks add.
    """

    NOTHING = enum.auto()
    INPUT = enum.auto()
    FILTERED = enum.auto()
    TIMESTEP = enum.auto()
    HEAD = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The evaluation at hand. `evaluation` counts predictions, of which a step may take several. `computed`, `reused`:
    what became of those before it; `in_row`: reused since the last computed one. `change`: the relative change of what
    is compared; None where nothing was.
    """

    step: int
    steps: int
    evaluation: int
    evaluations: int
    computed: int
    reused: int
    in_row: int
    change: float | None

    @property
    def first(self) -> bool:
        return self.step == 0

    @property
    def last(self) -> bool:
        return self.step == self.steps - 1


class Policy(abc.ABC):
    """When a row reuses. `head` and `tail` blocks at both ends always run. `order` is that of the polynomial that what
    is reused is extrapolated by. `since_computed`: changes are those since the blocks last ran, not since the last
    evaluation. `shared`: the branches of an output go by the change of the first of them.
    """

    compared: Compared
    since_computed = False
    shared = False
    head = 0
    tail = 0
    order = 0
    power = 0.0

    @abc.abstractmethod
    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        """Whether the evaluation is answered by what was kept, and what to keep for the next one. Asked only where
        there is something to answer with; `kept` is () after an evaluation that nobody was asked about.
        """


class Tea(Policy):
    """TeaCache (https://arxiv.org/abs/2411.19108, section 3.3)."""

    def __init__(self, cache: TeaCache) -> None:
        self.cache = cache
        self.compared = Compared.TIMESTEP if cache.signal == TIMESTEP else Compared.INPUT

    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        if at.change is None or at.first or at.last or _too_long(at, self.cache.max_continuous_cached_steps):
            return False, ()
        foretold = 0.0
        for coefficient in self.cache.coefficients:
            foretold = foretold * at.change + coefficient
        drift = sum(kept) + abs(foretold)
        return (True, (drift,)) if drift < self.cache.rel_l1_thresh else (False, ())


class FirstBlock(Policy):
    """First Block Cache (https://github.com/chengzeyi/ParaAttention)."""

    compared = Compared.HEAD
    since_computed = True
    head = 1

    def __init__(self, cache: FirstBlockCache) -> None:
        self.cache = cache

    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        if at.change is None or at.first or at.last or _too_long(at, self.cache.max_continuous_cached_steps):
            return False, ()
        return at.change < self.cache.threshold, ()


class Db(Policy):
    """DBCache with TaylorSeer and a step mask (https://github.com/vipshop/cache-dit), in its order of tests: warm-up,
    mask, limits, change.
    """

    compared = Compared.HEAD
    since_computed = True

    def __init__(self, cache: DbCache) -> None:
        self.cache = cache
        self.head, self.tail, self.order = cache.fn_compute_blocks, cache.bn_compute_blocks, cache.taylorseer_order
        self.shared = not cache.cfg_diff_compute_separate

    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        cache = self.cache
        if at.step < cache.max_warmup_steps or (cache.scm_steps_mask and cache.scm_steps_mask[at.step]):
            return False, ()
        if cache.max_cached_steps and at.reused >= cache.max_cached_steps:
            return False, ()
        if cache.scm_steps_mask and cache.scm_steps_policy == "static":
            return True, ()
        if _too_long(at, cache.max_continuous_cached_steps):
            return False, ()
        # as cache-dit has it: from 1 on, everything is alike
        always = cache.residual_diff_threshold >= 1.0
        return always or (at.change is not None and at.change < cache.residual_diff_threshold), ()


class Mag(Policy):
    """MagCache (https://arxiv.org/abs/2506.09045, section 3.2). It measures nothing: what it decides is known before
    the first step, and is the same for all branches of an output.
    """

    compared = Compared.NOTHING

    def __init__(self, cache: MagCache) -> None:
        self.cache = cache

    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        cache = self.cache
        if at.step < int(cache.retention_ratio * at.steps + 0.5):
            return False, ()
        ratio, error, skipped = kept or (1.0, 0.0, 0.0)
        ratio *= self.ratio(at.evaluation, at.evaluations)
        error, skipped = error + abs(1.0 - ratio), skipped + 1
        if error <= cache.threshold and skipped <= cache.max_skip_steps:
            return True, (ratio, error, skipped)
        return False, ()

    def ratio(self, evaluation: int, evaluations: int) -> float:
        """The ratio of an evaluation, of a curve that may have been measured for another number of them."""
        most = len(self.cache.ratios) - 1
        return self.cache.ratios[round(evaluation * most / max(1, evaluations - 1))]


class Sea(Policy):
    """SeaCache, as diffusers has it: TeaCache's sum over filtered inputs, without coefficients, and what is reused is
    extrapolated.
    """

    compared = Compared.FILTERED

    def __init__(self, cache: SeaCache) -> None:
        self.cache = cache
        self.order, self.power = cache.residual_order, cache.power_exp

    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        # an extrapolation takes as many computed steps as it has terms
        early = at.step < max(1, round(0.07 * at.steps)) or at.computed <= min(self.order, 1)
        if at.change is None or early or at.last or _too_long(at, self.cache.max_consecutive_cached):
            return False, ()
        drift = sum(kept) + at.change
        return (True, (drift,)) if drift < self.cache.threshold else (False, ())


class Observe(Policy):
    """Computes everything; see Calibration."""

    compared = Compared.INPUT

    def __init__(self, cache: Calibration) -> None:
        self.cache = cache

    def decide(self, at: Moment, kept: Kept) -> tuple[bool, Kept]:
        return False, ()


def _too_long(at: Moment, limit: int) -> bool:
    """Whether as many evaluations in a row were reused as may be; no limit where it is 0."""
    return 0 < limit <= at.in_row


POLICIES: Mapping[type[Any], type[Any]] = {
    TeaCache: Tea,
    FirstBlockCache: FirstBlock,
    DbCache: Db,
    MagCache: Mag,
    SeaCache: Sea,
    Calibration: Observe,
}


def policy_of(cache: RequestCache) -> Policy:
    """The policy of a request's cache."""
    policy: Policy = POLICIES[type(cache)](cache)
    return policy
