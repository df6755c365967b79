"""Step cache: its methods, what each request gets of them, and what a server or a request may not ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from omni_grpc.config import DIFFUSERS_CACHES, NATIVE_CACHES, CacheConfig, EngineConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native
from omni_grpc.types.cache_fields import FIELDS, MOST_RESIDUALS, from_peers, none_left
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.spec import Checkpoint, ModelSpec
from omni_grpc.types.step_cache import CALIBRATE, METHODS, CacheDraft, CacheQuality, Calibration, RequestCache
from omni_grpc.types.step_masks import steps_mask

Values = Mapping[str, Any]

AUTO = "auto"
"""The backend that stands for the methods which a quality chooses."""

BACKENDS = (AUTO, *NATIVE_CACHES, CALIBRATE)
"""Values of --cache-backend for native models."""

CALIBRATED = "step_cache"
"""The entry of --cache-config that has what `omni-grpc calibrate` found."""

FEWEST_STEPS = 8
"""Below so many steps, a quality chooses no cache: there is next to nothing to reuse."""

QUALITIES: Mapping[CacheQuality, tuple[str, Values]] = {
    CacheQuality.NEAR_LOSSLESS: ("sea_cache", {"threshold": 0.15}),
    CacheQuality.BALANCED: ("sea_cache", {"threshold": 0.3}),
    CacheQuality.FAST: (
        "cache_dit",
        {
            "fn_compute_blocks": 1,
            "residual_diff_threshold": 0.24,
            "max_warmup_steps": 4,
            "max_continuous_cached_steps": 4,
            "taylorseer_order": 1,
        },
    ),
}
"""What a quality is for a model that has not been calibrated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheOffer:
    """The step caches of a server. `own`: what a request gets that does not mention one. `values`: per method, what is
    set by the server or known of the model. `qualities`: what each of them stands for.
    """

    own: CacheDraft
    values: Mapping[str, Values]
    qualities: Mapping[CacheQuality, tuple[str, Values]]

    def asked(self, draft: CacheDraft | None, steps: int) -> tuple[str, Values]:
        """The method that a request gets, and the values of its fields, with those that nobody gave. "": none."""
        chosen = self.own if draft is None else draft
        if chosen.off or chosen.method == CALIBRATE:
            return "", {}
        method, given = chosen.method, chosen.given
        if chosen.quality is not None:
            if steps < FEWEST_STEPS:
                return "", {}
            method, given = self.qualities[chosen.quality]
        elif not method:
            return self.asked(None, steps)
        defaults = {name: field.default for name, field in FIELDS[method].items()}
        return method, {**defaults, **self.values.get(method, {}), **given}

    def complete(self, draft: CacheDraft | None, steps: int) -> RequestCache | None:
        """The cache of a request with so many steps. Of a request that `faults` has nothing against."""
        method, values = self.asked(draft, steps)
        if (self.own if draft is None else draft).method == CALIBRATE:
            return Calibration()
        if not method:
            return None
        if method == "cache_dit" and values["scm_steps_mask_policy"] and not values["scm_steps_mask"]:
            values = {**values, "scm_steps_mask": steps_mask(values["scm_steps_mask_policy"], steps)}
        ready = {name: _plain(value, FIELDS[method][name].default) for name, value in values.items()}
        return METHODS[method](**ready)

    def largest(self) -> RequestCache:
        """The cache of those that a request can have that keeps the most."""
        found = self.complete(CacheDraft(method="cache_dit", given={"taylorseer_order": MOST_RESIDUALS - 1}), 1)
        assert found is not None
        return found

    def faults(self, draft: CacheDraft | None, steps: int, blocks: int) -> Iterator[tuple[str, str]]:
        """What is wrong with the cache of a request: (method.field, why). `blocks`: those that could be skipped; 0:
        nobody knows yet.
        """
        method, values = self.asked(draft, steps)
        if not method:
            return
        found = field_faults(method, values)
        yield from ((f"{method}.{name}", why) for name, why in found.items())
        if not found:
            yield from ((f"{method}.{name}", why) for name, why in _step_faults(method, values, steps))
            if why := none_left(method, values, blocks):
                yield f"{method}.fn_compute_blocks", why


def field_faults(method: str, given: Values) -> dict[str, str]:
    """What is wrong with values of a method's fields, by field."""
    fields = FIELDS[method]
    wrong = {name: f"is unknown; {method} takes {', '.join(fields)}" for name in sorted(given.keys() - fields.keys())}
    wrong |= {name: why for name, value in given.items() if name in fields and (why := fields[name].fault(value))}
    return wrong


def _step_faults(method: str, values: Values, steps: int) -> Iterator[tuple[str, str]]:
    """What is wrong with values of a method for a request with so many steps."""
    if method == "mag_cache" and not values["ratios"]:
        yield (
            "ratios",
            "are needed: the magnitude ratios of this model are not known; measure them with `omni-grpc calibrate`, or "
            "choose another method",
        )
    if method == "cache_dit" and (mask := values["scm_steps_mask"]) and len(mask) != steps:
        yield "scm_steps_mask", f"has {len(mask)} entries, and the request has {steps} steps: it takes one for each"
    if method == "cache_dit" and values["scm_steps_mask_policy"] and not values["scm_steps_mask"]:
        try:
            steps_mask(values["scm_steps_mask_policy"], steps)
        except ValueError as error:
            yield "scm_steps_mask_policy", str(error)


def _plain(value: Any, like: Any) -> Any:
    """A value as the records have it: tuples for lists, floats for whole numbers that are measures."""
    if isinstance(like, tuple):
        flags = all(isinstance(each, bool) for each in value)
        return tuple(value if flags else map(float, value))
    return float(value) if isinstance(like, float) else value


def offer(config: EngineConfig, checkpoint: Checkpoint) -> CacheOffer | None:
    """The step caches of a server's requests; None where it has none, or the model is not native."""
    cache = config.cache
    if cache is None or cache.cache_backend not in BACKENDS or checkpoint.spec.family == OPAQUE_FAMILY:
        return None
    given, measured = _given(cache)
    known = known_values(checkpoint, measured)
    backend, quality = cache.cache_backend, cache.cache_quality
    values = {**known, backend: {**known.get(backend, {}), **given}} if backend in NATIVE_CACHES else known
    own = CacheDraft(method=backend)
    if quality is not None or backend == AUTO:
        own = CacheDraft(quality=CacheQuality((quality or "near_lossless").upper()))
    return CacheOffer(own=own, values=values, qualities={**QUALITIES, **known_qualities(checkpoint, measured)})


def _given(cache: CacheConfig) -> tuple[Values, Mapping[str, Values]]:
    """What --cache-config has: fields of the backend's method, or what `omni-grpc calibrate` found of the model."""
    given = cache.cache_config or {}
    return ({}, given[CALIBRATED]) if CALIBRATED in given else (from_peers(cache.cache_backend or "", given), {})


def known_values(checkpoint: Checkpoint, measured: Mapping[str, Values]) -> dict[str, Values]:
    """Method -> the values that the model's spec has, over them those that come with the checkpoint, and over those
    what was measured.
    """
    sources = (checkpoint.spec.step_cache, checkpoint.preferences.step_cache, measured)
    known: dict[str, Values] = {}
    for source in sources:
        known |= {method: {**known.get(method, {}), **values} for method, values in source.items() if method in FIELDS}
    return known


def known_qualities(checkpoint: Checkpoint, measured: Mapping[str, Values]) -> dict[CacheQuality, tuple[str, Values]]:
    """What qualities stand for, as it was measured for this checkpoint."""
    found = {**checkpoint.spec.step_cache, **checkpoint.preferences.step_cache, **measured}
    return {
        quality: (str(method), values)
        for quality in CacheQuality
        if quality.lower() in found
        for method, values in found[quality.lower()].items()
    }


def _section(config: EngineConfig) -> CacheConfig | None:
    return config.cache


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.cache is None:
        return {}
    backend, native = config.cache.cache_backend, is_native(checkpoint)
    offered = BACKENDS if native else DIFFUSERS_CACHES
    if backend is None:
        given = "cache_quality" if config.cache.cache_config is None else "cache_config"
        return {given: "needs --cache-backend"}
    if backend not in offered:
        runs, name = "is native" if native else "runs through diffusers", checkpoint.spec.name
        known = ", ".join(name for name in offered if name != CALIBRATE)
        return {"cache_backend": f"{backend!r} is not a step cache for {name}, which {runs}; choose from {known}"}
    return _native_faults(config, checkpoint) if native else _foreign_faults(config.cache)


def _foreign_faults(cache: CacheConfig) -> Faults:
    if cache.cache_quality is None:
        return {}
    return {"cache_quality": "is for native models; through diffusers, give the cache's own arguments: --cache-config"}


def _native_faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    assert config.cache is not None
    backend, (given, measured) = config.cache.cache_backend, _given(config.cache)
    if wrong := _measured_faults(measured):
        return {"cache_config": wrong}
    if backend in (AUTO, CALIBRATE):
        return {"cache_config": f"has no effect beside --cache-backend {backend}; name a method"} if given else {}
    assert backend is not None
    if config.cache.cache_quality is not None:
        return {"cache_quality": f"chooses the method itself; use --cache-backend {AUTO}, or leave it out"}
    if unknown := sorted(given.keys() - FIELDS[backend].keys()):
        fields = ", ".join(FIELDS[backend])
        return {"cache_config": f"has unknown keys {', '.join(unknown)}; {backend} takes {fields}"}
    if found := field_faults(backend, given):
        return {"cache_config": "; ".join(f"{name} {why}" for name, why in found.items())}
    if backend == "mag_cache" and not {**known_values(checkpoint, measured).get(backend, {}), **given}.get("ratios"):
        return {
            "cache_backend": f"{backend!r} needs the magnitude ratios of {checkpoint.spec.name}, which are not known; "
            "measure them with `omni-grpc calibrate`, or give them: --cache-config '{\"ratios\": [...]}'"
        }
    return {}


def _measured_faults(measured: Any) -> str:
    """What is wrong with the entry CALIBRATED, or ""."""
    if not isinstance(measured, Mapping):
        return f"{CALIBRATED}: expected an object"
    for name, values in measured.items():
        method, given = name, values
        if name.upper() in list(CacheQuality) and isinstance(values, Mapping) and len(values) == 1:
            ((method, given),) = values.items()
        if method not in FIELDS or not isinstance(given, Mapping):
            return f"{CALIBRATED}.{name} is unknown; it has methods ({', '.join(FIELDS)}) and qualities"
        if found := field_faults(method, given):
            return "; ".join(f"{CALIBRATED}.{name}.{field} {why}" for field, why in found.items())
    return ""


def _variants(spec: ModelSpec) -> Variants:
    return {name: {"cache_backend": name} for name in (AUTO, *NATIVE_CACHES, *DIFFUSERS_CACHES)}


RULES = FeatureRules(
    name="step_cache",
    section=_section,
    apply="omni_grpc.features.step_cache:apply",
    faults=_faults,
    column="step_cache",
    variants=_variants,
)
