"""LoRA adapters that requests can name."""

from __future__ import annotations

import dataclasses

from omni_grpc.config import EngineConfig, LoraConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec

DEVICE_CACHE, HOST_CACHE = 2 << 30, 8 << 30
"""Bytes of device and host memory for adapters, unless settings say otherwise, or those of `lora` take more."""


def _section(config: EngineConfig) -> LoraConfig | None:
    return config.loras


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.loras is None or is_native(checkpoint):
        return {}
    given = {name for name, value in dataclasses.asdict(config.loras).items() if value is not None} - {"lora"}
    why = f"{no_effect_through_diffusers(checkpoint)}, where adapters stay on the device until they are unloaded"
    return dict.fromkeys(sorted(given), why)


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
