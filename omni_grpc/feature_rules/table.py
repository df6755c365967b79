"""Every feature's rules. What walks this table (settings, `models --features`) knows no feature by name."""

from __future__ import annotations

from collections.abc import Mapping

from omni_grpc.config import EngineConfig, options
from omni_grpc.feature_rules import (
    attention,
    batch_invariant,
    cuda_graphs,
    gguf,
    layerwise_offload,
    lora,
    profiler,
    quant,
    step_cache,
)
from omni_grpc.feature_rules.base import Faults, FeatureRules
from omni_grpc.types.spec import Checkpoint

FEATURES: tuple[FeatureRules, ...] = (
    step_cache.RULES,
    quant.RULES,
    gguf.RULES,
    lora.RULES,
    layerwise_offload.RULES,
    batch_invariant.RULES,
    attention.RULES,
    cuda_graphs.RULES,
    profiler.RULES,
)
"""In the order in which faults are reported and columns are shown. The order of application is in worker/edits.py."""

BY_NAME: Mapping[str, FeatureRules] = {feature.name: feature for feature in FEATURES}


def is_on(feature: FeatureRules, config: EngineConfig) -> bool:
    """Whether a configuration turns a feature on, and none that it excludes."""
    return feature.section(config) is not None and not _conflicts(feature, config)


def feature_faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    """What the features refuse of a configuration for a checkpoint: setting -> what is wrong with it."""
    wrong: dict[str, str] = {}
    for feature in FEATURES:
        wrong |= feature.faults(config, checkpoint)
    for feature in FEATURES:
        conflicts = _conflicts(feature, config)
        if conflicts and _given(feature.setting, config):
            wrong[feature.setting] = feature.excludes[conflicts[0]]
    return wrong


def _conflicts(feature: FeatureRules, config: EngineConfig) -> list[str]:
    """The features that are on and that this one excludes."""
    return [name for name in feature.excludes if BY_NAME[name].section(config) is not None]


def _given(setting: str, config: EngineConfig) -> bool:
    """Whether a setting asks for something: 0 and the default do not."""
    return any(option.name == setting and bool(option.of(config)) for option in options())
