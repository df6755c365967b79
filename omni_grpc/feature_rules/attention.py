"""Attention backends and precisions by role, layer and step."""

from __future__ import annotations

from omni_grpc.config import EngineConfig
from omni_grpc.config.backends import AUTO
from omni_grpc.config.roles import Roles
from omni_grpc.feature_rules.base import Faults, FeatureRules, is_native
from omni_grpc.types.spec import Checkpoint


def _section(config: EngineConfig) -> Roles | None:
    """Batch invariance needs a batch-invariant form of the platform's own choice."""
    return config.model.attention or (Roles() if config.model.batch_invariant else None)


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    """A diffusers pipeline takes one backend for all of its attention."""
    roles = config.model.attention
    if roles is None or is_native(checkpoint):
        return {}
    asked = {"per_role": roles.per_role, "schedule": roles.schedule, "precision": roles.default.precision != AUTO}
    found = ", ".join(key for key, value in asked.items() if value)
    if not found:
        return {}
    why = f"has {found}, which has no effect on {checkpoint.spec.name}: it runs through diffusers"
    return {"diffusion_attention_config": why}


RULES = FeatureRules(
    name="attention",
    section=_section,
    apply="omni_grpc.features.attention:apply",
    faults=_faults,
)
