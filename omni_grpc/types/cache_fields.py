"""The fields of each step cache: what they may be, and what they are where nobody says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_grpc.types.step_cache import INPUT, TIMESTEP
from omni_grpc.types.step_masks import MASKS


@dataclasses.dataclass(frozen=True, slots=True)
class CacheField:
    """A field of a cache. `fault` says what is wrong with a value, or ""."""

    default: Any
    fault: Callable[[Any], str]


def number(least: float = 0.0, most: float = math.inf, *, meaning: str = "") -> Callable[[Any], str]:
    """A finite number within bounds."""

    def fault(value: Any) -> str:
        if _is_number(value) and least <= value <= most and value < math.inf:
            return ""
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        return f"is {value!r}, expected a number {bounds}{meaning and f' ({meaning})'}"

    return fault


def count(least: int = 0, most: int = 1000) -> Callable[[Any], str]:
    """A whole number within bounds."""

    def fault(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return ""
        return f"is {value!r}, expected a whole number from {least} to {most}"

    return fault


def word(*known: str) -> Callable[[Any], str]:
    """One of these words."""

    def fault(value: Any) -> str:
        shown = ", ".join(repr(name) for name in known)
        return "" if value in known else f"is {value!r}, expected one of {shown}"

    return fault


def flag(value: Any) -> str:
    """True or false."""
    return "" if isinstance(value, bool) else f"is {value!r}, expected true or false"


def numbers(meaning: str, least: float = -math.inf) -> Callable[[Any], str]:
    """A list of finite numbers."""

    def fault(values: Any) -> str:
        if is_list(values) and all(_is_number(value) and least <= value < math.inf for value in values):
            return ""
        shown = ", ".join(map(repr, values)) if is_list(values) else repr(values)
        return f"is {shown}, expected finite numbers, {meaning}"

    return fault


def mask(values: Any) -> str:
    """A list of true and false, or of 1 and 0."""
    if is_list(values) and all(value in (0, 1) for value in values):
        return ""
    return f"is {values!r}, expected a list with true for each step that is computed, false for the others"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_list(value: Any) -> bool:
    """Whether a value is a list or a tuple; text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str)


MOST_RESIDUALS = 3
"""Residuals that a row keeps, at most: one more than the order of what extrapolates them."""

NEVER = "0 never reuses a step"

FIELDS: Mapping[str, Mapping[str, CacheField]] = {
    "tea_cache": {
        "rel_l1_thresh": CacheField(0.2, number(meaning=NEVER)),
        "coefficients": CacheField((1.0, 0.0), numbers("highest power first")),
        "max_continuous_cached_steps": CacheField(0, count()),
        "signal": CacheField(INPUT, word(INPUT, TIMESTEP)),
    },
    "first_block": {
        # ParaAttention's for FLUX.1
        "threshold": CacheField(0.08, number(meaning=NEVER)),
        "max_continuous_cached_steps": CacheField(0, count()),
    },
    # vLLM-Omni's defaults, which are made for few blocks in front and mixed models
    "cache_dit": {
        "fn_compute_blocks": CacheField(1, count(1)),
        "bn_compute_blocks": CacheField(0, count()),
        "max_warmup_steps": CacheField(4, count()),
        "residual_diff_threshold": CacheField(0.24, number(meaning=NEVER)),
        "max_continuous_cached_steps": CacheField(3, count()),
        "max_cached_steps": CacheField(0, count()),
        "taylorseer_order": CacheField(0, count(0, MOST_RESIDUALS - 1)),
        "cfg_diff_compute_separate": CacheField(True, flag),
        "scm_steps_mask_policy": CacheField("", word("", *MASKS)),
        "scm_steps_policy": CacheField("dynamic", word("dynamic", "static")),
        "scm_steps_mask": CacheField((), mask),
    },
    "mag_cache": {
        "threshold": CacheField(0.06, number(meaning=NEVER)),
        "max_skip_steps": CacheField(3, count(0, 100)),
        "retention_ratio": CacheField(0.2, number(0.0, 1.0)),
        "ratios": CacheField((), numbers("one for each step, above 0", 1e-6)),
    },
    "sea_cache": {
        "threshold": CacheField(0.15, number(meaning=NEVER)),
        "residual_order": CacheField(1, count(0, MOST_RESIDUALS - 1)),
        "max_consecutive_cached": CacheField(2, count()),
        "power_exp": CacheField(2.0, number(0.0, 10.0)),
    },
}
"""Method -> field -> its rule."""

ALIASES: Mapping[str, str] = {
    "teacache": "tea_cache",
    "fbcache": "first_block",
    "first_block_cache": "first_block",
    "dbcache": "cache_dit",
    "mag": "mag_cache",
    "magcache": "mag_cache",
    "sea": "sea_cache",
    "seacache": "sea_cache",
}
"""Other names of methods: of peers, of papers, and of version 0.1."""

PEERS: Mapping[str, Mapping[str, str]] = {
    "cache_dit": {"Fn_compute_blocks": "fn_compute_blocks", "Bn_compute_blocks": "bn_compute_blocks"},
    "mag_cache": {
        "mag_threshold": "threshold",
        "mag_max_skip_steps": "max_skip_steps",
        "mag_retention_ratio": "retention_ratio",
        "mag_ratios": "ratios",
    },
    "sea_cache": {
        "sea_threshold": "threshold",
        "sea_residual_order": "residual_order",
        "sea_max_consecutive_cached": "max_consecutive_cached",
        "sea_power_exp": "power_exp",
    },
}
"""Method -> names that cache-dit and vLLM-Omni have for a field -> ours."""


def none_left(method: str, values: Mapping[str, Any], blocks: int) -> str:
    """What is wrong with fn_compute_blocks where values leave none of so many blocks to skip, or ""."""
    if method != "cache_dit":
        return ""
    head, tail = values["fn_compute_blocks"], values["bn_compute_blocks"]
    if not 0 < blocks <= head + tail:
        return ""
    return (
        f"is {head}, and with bn_compute_blocks {tail} all {blocks} blocks of the model always run, so that nothing is "
        f"reused; together they are at most {blocks - 1}"
    )


def from_peers(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a method with our names. cache-dit's `enable_taylorseer` is an order of 1 where no order is given,
    and of 0 where it is off; its -1 for no limit is 0.
    """
    names = PEERS.get(method, {})
    found = {names.get(name, name): value for name, value in given.items()}
    if method == "cache_dit":
        taylor = found.pop("enable_taylorseer", None)
        if taylor is not None:
            found["taylorseer_order"] = found.get("taylorseer_order", 1) if taylor else 0
        limits = ("max_cached_steps", "max_continuous_cached_steps")
        found |= {name: 0 for name in limits if found.get(name) == -1}
        if "scm_steps_mask_policy" in found:
            found["scm_steps_mask_policy"] = found["scm_steps_mask_policy"] or ""
    return found
