"""LoRA adapters that requests can name."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, LoraConfig
from omni_grpc.feature_rules.base import FeatureRules, Variants
from omni_grpc.types.spec import ModelSpec


def _section(config: EngineConfig) -> LoraConfig | None:
    return config.loras


def _variants(spec: ModelSpec) -> Variants:
    return {"": {"lora": {"name": "file"}}}


RULES = FeatureRules(
    name="lora",
    section=_section,
    apply="omni_grpc.features.lora:apply",
    column="lora",
    variants=_variants,
)
