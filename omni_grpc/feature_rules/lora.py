"""LoRA adapters that requests can name."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, LoraConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec


def sources(config: LoraConfig) -> dict[str, dict[str, str]]:
    """The paths of adapters by id and by the component that the operator says; "" where he says none."""
    found: dict[str, dict[str, str]] = {}
    for key, path in (config.lora or {}).items():
        name, _, component = key.partition("@")
        found.setdefault(name, {})[component] = path
    return found


def _section(config: EngineConfig) -> LoraConfig | None:
    return config.loras


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.loras is None:
        return {}
    if not is_native(checkpoint):
        return {"lora": f"{no_effect_through_diffusers(checkpoint)}; LoRA adapters need a native model"}
    wrong = _wrong_component(config.loras, checkpoint)
    return {"lora": wrong} if wrong else {}


def _wrong_component(config: LoraConfig, checkpoint: Checkpoint) -> str:
    """What is wrong with the components of adapters: names that the model does not have, or a file for one beside one
    for all; "" if nothing is.
    """
    encoders = (
        name for name, kind in checkpoint.configs.get("", {}).items() if name.startswith("text_encoder") and kind
    )
    known = (*checkpoint.denoisers, *encoders)
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
