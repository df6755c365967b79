"""GGUF: the weights of denoisers come from files of their own, named by a setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omni_grpc.checkpoint.layout import HUB_FILE
from omni_grpc.config import EngineConfig, QuantizationConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, Variants, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint, ModelSpec

SCHEME = "gguf"
"""What --quantization calls it."""


def gguf_files(config: QuantizationConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Component -> its GGUF file as the setting names it: a path, or a file on the hub. A file without a component
    belongs to the only denoiser; where there are several its component is "".
    """
    denoisers = _denoisers(checkpoint)
    found = {}
    for text in config.gguf_model:
        component, equals, file = text.partition("=")
        named = bool(equals) and component in checkpoint.spec.weights
        found[component if named else denoisers[0] if len(denoisers) == 1 else ""] = file if named else text
    return found


def _denoisers(checkpoint: Checkpoint) -> list[str]:
    return [component for component in checkpoint.spec.weights if component in checkpoint.configs]


def _section(config: EngineConfig) -> QuantizationConfig | None:
    chosen = config.quantization
    return chosen if chosen is not None and chosen.quantization == SCHEME else None


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    chosen = config.quantization or QuantizationConfig()
    name, asked = checkpoint.spec.name, chosen.quantization == SCHEME
    if not asked or not is_native(checkpoint):
        why = no_effect_through_diffusers(checkpoint) if asked else "needs --quantization gguf"
        return {"gguf_model": why} if chosen.gguf_model else {}
    wrong = {}
    if chosen.ignored_layers:
        wrong["ignored_layers"] = "has no effect with --quantization gguf: the file decides the type of each layer"
    files, denoisers = gguf_files(chosen, checkpoint), _denoisers(checkpoint)
    if checkpoint.spec.single_file is None:
        wrong["quantization"] = f"gguf is not supported yet for {name}"
    elif not files:
        wrong["gguf_model"] = "is required by --quantization gguf: a path, or ORG/NAME:FILE on the hub"
    elif files.keys() != set(denoisers):
        example = ",".join(f"{component}=FILE" for component in denoisers)
        wrong["gguf_model"] = f"must name a file for each of {', '.join(denoisers)} of {name}: --gguf-model {example}"
    elif absent := [file for file in files.values() if not (Path(file).is_file() or HUB_FILE.fullmatch(file))]:
        wrong["gguf_model"] = f"{absent[0]} is neither a local file nor a file on the hub (ORG/NAME:FILE)"
    return wrong


def _replaces(config: EngineConfig, checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(gguf_files(config.quantization, checkpoint)) if config.quantization else frozenset()


def _variants(spec: ModelSpec) -> Variants:
    files = ",".join(f"{component}=org/name:file" for component in spec.weights)
    return {SCHEME: {"quantization": SCHEME, "gguf_model": files}}


RULES = FeatureRules(
    name="gguf",
    section=_section,
    apply="omni_grpc.features.gguf:apply",
    faults=_faults,
    replaces=_replaces,
    open_weights="omni_grpc.loading.gguf:open_files",
    column="quantization",
    variants=_variants,
)
