"""Which presets a model has, and the one that a server makes its default (`--recipe`), with the adapters of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from omni_grpc.checkpoint.layout import HUB_FILE
from omni_grpc.checkpoint.presets import known_presets
from omni_grpc.config import EngineConfig, LoraConfig, RecipeConfig
from omni_grpc.config.command_line import meant
from omni_grpc.feature_rules import lora
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.lora import joined, split
from omni_grpc.types.preset import Preset
from omni_grpc.types.spec import Checkpoint


def with_presets(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the presets that fit it, and with its recipe.

    Raises ConfigError (BAD_PRESET) for a file of presets that cannot be used, and (BAD_RECIPE) for a recipe that is not
    known, does not fit, or whose adapters are not to be had.
    """
    chosen = config.recipes or RecipeConfig()
    known = known_presets(chosen.presets)
    fitting = tuple(preset for preset in known if preset.fits(checkpoint.spec.name, checkpoint.configs))
    checkpoint = dataclasses.replace(checkpoint, presets=fitting)
    if chosen.recipe is None:
        return checkpoint
    name, equals, files = chosen.recipe.partition("=")
    preset = next((one for one in fitting if one.name == name), None)
    if preset is None:
        raise _refused(_why_not(name, known, checkpoint))
    loras = _files(preset, files.split(",") if equals else [], (config.loras or LoraConfig()).lora or {})
    wrong = lora.RULES.faults(with_loras(config, loras), checkpoint)
    if loras and wrong:
        raise _refused(f"{name} brings LoRA adapters: --lora {'; '.join(wrong.values())}")
    return dataclasses.replace(checkpoint, recipe=name, recipe_loras=loras)


def with_loras(config: EngineConfig, loras: Mapping[str, str]) -> EngineConfig:
    """The configuration with more adapters, id -> file, beside those of `--lora`."""
    section = config.loras or LoraConfig()
    merged = dataclasses.replace(section, lora={**(section.lora or {}), **loras} or None)
    return dataclasses.replace(config, loras=merged)


def _why_not(name: str, known: tuple[Preset, ...], checkpoint: Checkpoint) -> str:
    of = next((preset for preset in known if preset.name == name), None)
    has = ", ".join(one.name for one in known if one.fits(checkpoint.spec.name, checkpoint.configs)) or "none"
    if of is None:
        return f"{name!r} is no preset{meant(name, [one.name for one in known])}; for {checkpoint.name} there is {has}"
    also = "".join(f", {key} {value}" for key, value in of.configs.items())
    return f"{name} is for {', '.join(of.pipelines)}{also}, which {checkpoint.name} is not; for it there is {has}"


def _files(preset: Preset, given: list[str], loaded: Mapping[str, str]) -> dict[str, str]:
    """Adapter, as `--lora` names it -> its file: as given, else on the hub. Those that `--lora` loads need none."""
    loaded = {split(key)[0]: path for key, path in loaded.items()}
    ids = [one.lora.lora_id for one in preset.loras]
    if given and len(given) != len(ids):
        wanted = f"it has {len(ids)}: {', '.join(ids)}" if ids else "it has no adapters"
        raise _refused(f"{preset.name} is given {len(given)} files, and {wanted}")
    if given and (twice := [name for name in ids if name in loaded]):
        raise _refused(f"{preset.name} is given a file for {twice[0]}, which --lora loads too; leave one of them out")
    found = {}
    for index, one in enumerate(preset.loras):
        name, file = one.lora.lora_id, given[index] if given else one.file
        if name in loaded:
            continue
        if not file:
            raise _refused(
                f"{preset.name} needs the adapter {name}, and says no file of the hub for it; give its file: "
                f"{preset.name}={','.join(f'FILE{number + 1}' for number in range(len(ids)))}"
            )
        if not Path(file).exists() and not HUB_FILE.fullmatch(file):
            raise _refused(f"{preset.name}: {file!r} is neither a file or folder nor ORG/NAME:FILE on the hub")
        # a file of one expert, whatever it is called
        found[joined(name, one.lora.target)] = file
    return found


def _refused(why: str) -> ConfigError:
    message = f"--recipe {why}"
    return ConfigError(message, reason="BAD_RECIPE", violations=(Violation("recipe", message),))
