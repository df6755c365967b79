"""LoRA adapters that requests can name."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, LoraConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec


def _section(config: EngineConfig) -> LoraConfig | None:
    return config.loras


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.loras is None or is_native(checkpoint):
        return {}
    return {"lora": f"{no_effect_through_diffusers(checkpoint)}; LoRA adapters need a native model"}


def _variants(spec: ModelSpec) -> Variants:
    return {"": {"lora": {"name": "file"}}}


RULES = FeatureRules(
    name="lora",
    section=_section,
    apply="omni_grpc.features.lora:apply",
    faults=_faults,
    column="lora",
    variants=_variants,
)
