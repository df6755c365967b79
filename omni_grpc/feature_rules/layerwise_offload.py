"""Layerwise offload: the blocks' weights live in the host's memory."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, OffloadConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec


def _section(config: EngineConfig) -> OffloadConfig | None:
    return config.offload


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    offload = config.offload
    if offload is None:
        return {}
    if not offload.enable_layerwise_offload:
        return {"layerwise_resident_blocks": "needs --enable-layerwise-offload"}
    if config.adapter.enable_cpu_offload and not is_native(checkpoint):
        return {"enable_layerwise_offload": "excludes --enable-cpu-offload; choose one"}
    if offload.layerwise_resident_blocks and not is_native(checkpoint):
        return {"layerwise_resident_blocks": no_effect_through_diffusers(checkpoint)}
    return {}


def _variants(spec: ModelSpec) -> Variants:
    return {"": {"enable_layerwise_offload": True}}


RULES = FeatureRules(
    name="layerwise_offload",
    section=_section,
    apply="omni_grpc.features.layerwise_offload:apply",
    faults=_faults,
    column="layerwise_offload",
    variants=_variants,
)
