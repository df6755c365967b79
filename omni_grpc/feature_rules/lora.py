"""LoRA adapters that requests can name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from omni_grpc.config import EngineConfig, LoraConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.lora import split
from omni_grpc.types.spec import Checkpoint, ModelSpec

DEVICE_CACHE, HOST_CACHE = 2 << 30, 8 << 30
"""Bytes of device and host memory for adapters, unless settings say otherwise, or those of `lora` take more."""

MERGED_CACHE = 1 << 30
"""Bytes of the device for merged weights, unless a setting says otherwise."""


def sources(config: LoraConfig) -> dict[str, dict[str, str]]:
    """The paths of adapters by id and by the component that the operator says; "" where he says none."""
    found: dict[str, dict[str, str]] = {}
    for key, path in (config.lora or {}).items():
        name, component = split(key)
        found.setdefault(name, {})[component] = path
    return found


def device_cache(config: EngineConfig) -> int:
    """Bytes of the device that are kept for adapters, as far as settings and files tell before anything is loaded."""
    loras = _section(config)
    if loras is None:
        return 0
    if loras.lora_device_cache is not None:
        return loras.lora_device_cache
    return max(DEVICE_CACHE, sum(_bytes(Path(path)) for path in (loras.lora or {}).values()))


def device_bytes(config: EngineConfig) -> int:
    """Bytes of the device that are kept for adapters and for weights with them merged in."""
    loras = _section(config)
    if loras is None:
        return 0
    return device_cache(config) + (MERGED_CACHE if loras.lora_merged_cache is None else loras.lora_merged_cache)


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
    if config.loras is None:
        return {}
    if not is_native(checkpoint):
        given = {name: value for name, value in dataclasses.asdict(config.loras).items() if value is not None}
        return {name: f"{no_effect_through_diffusers(checkpoint)}; LoRA adapters need a native model" for name in given}
    wrong = _wrong_component(config.loras, checkpoint)
    return {"lora": wrong} if wrong else {}


def _wrong_component(config: LoraConfig, checkpoint: Checkpoint) -> str:
    """What is wrong with the components of adapters: names that the model does not have, or a file for one beside one
    for all; "" if nothing is.
    """
    known = (*checkpoint.denoisers, *checkpoint.text_encoders)
    for name, paths in sources(config).items():
        said = [component for component in paths if component]
        if wrong := [component for component in said if known and component not in known]:
            return f"has {name}@{wrong[0]}; the components of {checkpoint.name} are {', '.join(known)}"
        if not name:
            return f"has a file for {said[0]} without a name; write NAME@{said[0]}"
        if said and len(paths) > len(said):
            return (
                f"has {name}@{said[0]}, and {name} for all components; say for each file which one it is for "
                f"({', '.join(f'{name}@{component}' for component in checkpoint.denoisers)})"
            )
    return ""


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
ENCODERS = FeatureRules(name="lora_encoders", section=_section, apply="omni_grpc.features.lora.encoders:apply")
"""The same adapters on the text encoders of a pipeline."""
