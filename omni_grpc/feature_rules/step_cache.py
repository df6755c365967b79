"""Step cache: its backends, its arguments, and what a request gets that does not mention it."""

from __future__ import annotations

from omni_grpc.config import DIFFUSERS_CACHES, NATIVE_CACHES, CacheConfig, EngineConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.spec import Checkpoint, ModelSpec
from omni_grpc.types.step_cache import TeaCache, coefficients_fault, threshold_fault

DEFAULT_THRESHOLD = 0.2
"""Of TeaCache, where neither the request nor --cache-config gives one."""


def default_cache(config: EngineConfig, spec: ModelSpec) -> TeaCache | None:
    """The step cache of a request that does not mention it, for a native model."""
    if config.cache is None or config.cache.cache_backend not in NATIVE_CACHES or spec.family == OPAQUE_FAMILY:
        return None
    given = config.cache.cache_config or {}
    return TeaCache(
        rel_l1_thresh=given.get("rel_l1_thresh", DEFAULT_THRESHOLD),
        coefficients=tuple(given.get("coefficients") or spec.cache_coefficients),
    )


def _section(config: EngineConfig) -> CacheConfig | None:
    return config.cache


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.cache is None:
        return {}
    backend, native = config.cache.cache_backend, is_native(checkpoint)
    offered = NATIVE_CACHES if native else DIFFUSERS_CACHES
    if backend is None:
        return {"cache_config": "needs --cache-backend"}
    if backend not in offered:
        runs, name = "is native" if native else "runs through diffusers", checkpoint.spec.name
        known = ", ".join(offered)
        return {"cache_backend": f"{backend!r} is not a step cache for {name}, which {runs}; choose from {known}"}
    return _argument_faults(config.cache) if native else {}


def _argument_faults(cache: CacheConfig) -> Faults:
    given = cache.cache_config or {}
    if unknown := sorted(given.keys() - {"rel_l1_thresh", "coefficients"}):
        keys = ", ".join(unknown)
        return {"cache_config": f"has unknown keys {keys}; {cache.cache_backend} takes rel_l1_thresh and coefficients"}
    faults = {
        "rel_l1_thresh": threshold_fault(given.get("rel_l1_thresh", DEFAULT_THRESHOLD)),
        "coefficients": coefficients_fault(given.get("coefficients") or ()),
    }
    found = "; ".join(f"{key} {fault}" for key, fault in faults.items() if fault)
    return {"cache_config": found} if found else {}


def _variants(spec: ModelSpec) -> Variants:
    return {name: {"cache_backend": name} for name in (*NATIVE_CACHES, *DIFFUSERS_CACHES)}


RULES = FeatureRules(
    name="step_cache",
    section=_section,
    apply="omni_grpc.features.step_cache:apply",
    faults=_faults,
    column="step_cache",
    variants=_variants,
)
