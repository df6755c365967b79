"""LoRA adapters that requests can name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from omni_grpc.config import EngineConfig, LoraConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec

DEVICE_CACHE, HOST_CACHE = 2 << 30, 8 << 30
"""Bytes of device and host memory for adapters, unless settings say otherwise, or those of `lora` take more."""

MERGED_CACHE = 1 << 30
"""Bytes of the device for merged weights, unless a setting says otherwise."""


def device_cache(config: EngineConfig) -> int:
    """Bytes of the device that are kept for adapters, as far as settings and files tell before anything is loaded."""
    loras = _section(config)
    if loras is None:
        return 0
    if loras.lora_device_cache is not None:
        return loras.lora_device_cache
    return max(DEVICE_CACHE, sum(_bytes(Path(path)) for path in (loras.lora or {}).values()))


def _bytes(path: Path) -> int:
    """Of the safetensors files that a path stands for; what is not there is told of where it is loaded."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _section(config: EngineConfig) -> LoraConfig | None:
    if config.loras is None and (config.fleet.lora_roots or config.fleet.lora_hub):
        # there are none yet, and LoadLora is to load some
        return LoraConfig()
    return config.loras


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.loras is None or is_native(checkpoint):
        return {}
    given = {name: value for name, value in dataclasses.asdict(config.loras).items() if value is not None}
    return {name: f"{no_effect_through_diffusers(checkpoint)}; LoRA adapters need a native model" for name in given}


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
