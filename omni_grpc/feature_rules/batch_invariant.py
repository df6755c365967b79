"""Batch invariance: a request gives the same bits whatever else is in the batch."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, ModelConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint


def _section(config: EngineConfig) -> ModelConfig | None:
    return config.model if config.model.batch_invariant else None


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if not config.model.batch_invariant or is_native(checkpoint):
        return {}
    return {"batch_invariant": no_effect_through_diffusers(checkpoint)}


RULES = FeatureRules(
    name="batch_invariant",
    section=_section,
    apply="omni_grpc.features.batch_invariant:apply",
    faults=_faults,
)
