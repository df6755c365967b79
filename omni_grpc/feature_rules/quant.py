"""fp8 and int8: on even where no setting asks for them, because a checkpoint may be stored in 8 bits."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, QuantizationConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec

SCHEMES = ("fp8", "int8")
"""What --quantization calls them."""


def _section(config: EngineConfig) -> QuantizationConfig | None:
    chosen = config.quantization or QuantizationConfig()
    return chosen if chosen.quantization in (None, *SCHEMES) else None


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    chosen = config.quantization
    if chosen is None:
        return {}
    if not is_native(checkpoint):
        own = "use quantization_config in --diffusers-load-kwargs"
        return {"quantization": f"{no_effect_through_diffusers(checkpoint)}; {own}"}
    if chosen.quantization is None and chosen.ignored_layers:
        return {"ignored_layers": "needs --quantization"}
    return {}


def _variants(spec: ModelSpec) -> Variants:
    return {name: {"quantization": name} for name in SCHEMES}


RULES = FeatureRules(
    name="quant",
    section=_section,
    apply="omni_grpc.features.quant:apply",
    faults=_faults,
    column="quantization",
    variants=_variants,
)
