"""Reads presets, which are data: YAML files in the folders of model families, and files of the operator's.

presets:
  - name: four-steps
    title: Four steps
    source: https://example.com/model-card
    fits: {pipelines: [QwenImagePipeline], config: {transformer.num_layers: 60}}
    sets:
      steps: 4
      guidance: {true_cfg_scale: 1.0}
      loras: [{id: four-steps, scale: 1.0, target: transformer, file: ORG/NAME:FILE}]
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.layout import HUB_FILE
from omni_grpc.checkpoint.registry import family_folders
from omni_grpc.config.command_line import meant
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.lora import MAX_LORA_SCALE, MAX_LORAS, Lora
from omni_grpc.types.os_errors import plain
from omni_grpc.types.preset import NO_PRESET, Preset, PresetLora
from omni_grpc.types.request import GuidanceDraft, GuidanceNorm

Check = Callable[[Any], bool]
Rule = tuple[Check, str]
"""Whether a value is one of an entry, and what is expected."""

FOLDER = "presets"
"""Of a model family: its presets, as *.yaml."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)


class _Fault(Exception):
    """What is wrong with an entry; its text says which."""


def shipped_presets() -> tuple[Preset, ...]:
    """Those of the model families that are installed."""
    return tuple(
        preset
        for folder in (*family_folders(), Path(__file__).resolve().parents[1] / "adapter")
        for file in sorted((folder / FOLDER).glob("*.yaml"))
        for preset in _in_file(str(file))
    )


def known_presets(files: Iterable[str]) -> tuple[Preset, ...]:
    """The shipped presets and those of an operator's files. Raises ConfigError, with the entry, for a file that cannot
    be used, and for a name that two presets have.
    """
    found: dict[str, Preset] = {preset.name: preset for preset in shipped_presets()}
    for file in files:
        for preset in _in_file(file):
            if preset.name in found:
                raise _refused(f"{file}: {preset.name} is the name of another preset already; choose another name")
            found[preset.name] = preset
    return tuple(sorted(found.values(), key=lambda preset: preset.name))


def _in_file(file: str) -> tuple[Preset, ...]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise _refused(plain(error)) from error
    except UnicodeDecodeError as error:
        raise _refused(f"{file} is not UTF-8 text") from error
    try:
        return read_presets(text)
    except ValueError as error:
        raise _refused(f"{file} {error}") from error
    except _Fault as fault:
        raise _refused(f"{file}: {fault}") from fault


def _refused(why: str) -> ConfigError:
    message = f"--presets {why}"
    return ConfigError(message, reason="BAD_PRESET", violations=(Violation("presets", message),))


@functools.lru_cache(maxsize=64)
def read_presets(text: str) -> tuple[Preset, ...]:
    """The presets in the text of a file. Raises ValueError for what is no YAML, and an error that names the entry for
    one that is unknown, missing or of the wrong type.
    """
    from omni_grpc.config.yaml_text import read_yaml  # here, since this leaf needs the standard library alone

    content = _entries(read_yaml(text), "", {"presets": (_is_list, "a list of presets")}, needed=("presets",))
    made = tuple(_preset(entry, f"presets[{index}]") for index, entry in enumerate(content["presets"]))
    names = [preset.name for preset in made]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _Fault(f"presets[{index}].name is {name!r}, which another preset of the file has")
    return made


# --- entries ----------------------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_scale(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 100


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_sigmas(value: Any) -> bool:
    falling = isinstance(value, list) and bool(value) and all(_is_positive(level) and level <= 1 for level in value)
    return falling and all(after < before for before, after in itertools.pairwise(value))


_COUNT = (_is_count, "an integer above 0")
_FLAG = (_is_flag, "true or false")
_MAPPING = (_is_mapping, "entries by name")
_NUMBER = (_is_number, "a number")
_POSITIVE = (_is_positive, "a number above 0")
_SCALE = (_is_scale, "a number from 0 to 100")
_SHARE = (_is_share, "a number from 0 to 1")
_TEXT = (_is_text, "text")
_TEXTS = (lambda value: _is_list(value) and all(map(_is_text, value)), "a list of texts")

PRESET: Mapping[str, Rule] = {
    "name": (
        lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)) and value != NO_PRESET,
        f"at most 64 of a-z, 0-9, '.', '_' and '-', and not {NO_PRESET!r}",
    ),
    "title": _TEXT,
    "source": _TEXT,
    "fits": _MAPPING,
    "sets": _MAPPING,
}
FITS: Mapping[str, Rule] = {"pipelines": _TEXTS, "config": _MAPPING}
SETS: Mapping[str, Rule] = {
    "steps": _COUNT,
    "sigmas": (_is_sigmas, "a list of numbers that fall, from at most 1 to above 0"),
    "shift": _POSITIVE,
    "scheduler": _TEXT,
    "scheduler_config": _MAPPING,
    "guidance": _MAPPING,
    "loras": (lambda value: _is_list(value) and len(value) <= MAX_LORAS, f"a list of at most {MAX_LORAS} adapters"),
}
GUIDANCE: Mapping[str, Rule] = {
    "scale": _SCALE,
    "true_cfg_scale": _SCALE,
    "norm": (lambda value: value in list(GuidanceNorm), f"one of {', '.join(GuidanceNorm)}"),
    "rescale": _SHARE,
    "interval_start": _SHARE,
    "interval_end": _SHARE,
    "scale_low_noise": _SCALE,
    "boundary_ratio": _SHARE,
}
SCHEDULER_CONFIG: Mapping[str, Rule] = {
    "shift": _POSITIVE,
    "flow_shift": _POSITIVE,
    "use_dynamic_shifting": _FLAG,
    "base_shift": _NUMBER,
    "max_shift": _NUMBER,
    "base_image_seq_len": _COUNT,
    "max_image_seq_len": _COUNT,
    "time_shift_type": (lambda value: value in ("exponential", "linear"), "exponential or linear"),
    "shift_terminal": (lambda value: value is None or (_is_share(value) and value > 0), "null or a number up to 1"),
    "use_karras_sigmas": _FLAG,
    "use_exponential_sigmas": _FLAG,
    "use_beta_sigmas": _FLAG,
    "stochastic_sampling": _FLAG,
}
"""Entries of a scheduler's config that a preset may replace, by diffusers' names."""
LORA: Mapping[str, Rule] = {
    "id": _TEXT,
    "scale": (lambda value: _is_number(value) and abs(value) <= MAX_LORA_SCALE, f"a number up to {MAX_LORA_SCALE:g}"),
    "target": _TEXT,
    "file": (lambda value: isinstance(value, str) and bool(HUB_FILE.fullmatch(value)), "ORG/NAME:FILE on the hub"),
}


def _preset(entry: Any, where: str) -> Preset:
    own = _entries(entry, where, PRESET, needed=("name", "title", "fits", "sets"))
    fits = _entries(own["fits"], f"{where}.fits", FITS, needed=("pipelines",))
    sets = _entries(own["sets"], f"{where}.sets", SETS)
    where = f"{where}.sets"
    sigmas, steps = tuple(map(float, sets.get("sigmas", ()))), sets.get("steps")
    if sigmas and steps not in (None, len(sigmas)):
        raise _Fault(f"{where}.sigmas has {len(sigmas)} levels, and {where}.steps is {steps}; make them one number")
    if "shift" in sets and "scheduler_config" in sets:
        raise _Fault(f"{where}.shift stands for the whole rule, and {where}.scheduler_config is set too; keep one")
    guidance = _entries(sets.get("guidance", {}), f"{where}.guidance", GUIDANCE)
    if "norm" in guidance:
        guidance["norm"] = GuidanceNorm(guidance["norm"])
    loras = tuple(_lora(one, f"{where}.loras[{index}]") for index, one in enumerate(sets.get("loras", ())))
    if len({one.lora.lora_id for one in loras}) < len(loras):
        raise _Fault(f"{where}.loras names an adapter twice")
    return Preset(
        name=own["name"],
        title=own["title"],
        source=own.get("source", ""),
        pipelines=tuple(fits["pipelines"]),
        configs=fits.get("config", {}),
        steps=len(sigmas) or steps,
        sigmas=sigmas,
        shift=float(sets["shift"]) if "shift" in sets else None,
        scheduler=sets.get("scheduler", ""),
        scheduler_config=_entries(sets.get("scheduler_config", {}), f"{where}.scheduler_config", SCHEDULER_CONFIG),
        guidance=GuidanceDraft(**{name: _as_float(value) for name, value in guidance.items()}),
        loras=loras,
    )


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value


def _lora(entry: Any, where: str) -> PresetLora:
    own = _entries(entry, where, LORA, needed=("id",))
    lora = Lora(lora_id=own["id"], scale=float(own.get("scale", 1.0)), target=own.get("target", ""))
    return PresetLora(lora=lora, file=own.get("file", ""))


def _entries(content: Any, where: str, known: Mapping[str, Rule], needed: Iterable[str] = ()) -> dict[str, Any]:
    """The entries of a mapping. Raises a fault for one that is unknown, missing or of the wrong type."""
    if not _is_mapping(content):
        raise _Fault(f"{where or 'the file'} is {content!r}, expected entries by name: {', '.join(known)}")
    for fault in _faults(content, where, known, needed):
        raise _Fault(fault)
    return dict(content)


def _faults(content: Mapping[str, Any], where: str, known: Mapping[str, Rule], needed: Iterable[str]) -> Iterator[str]:
    path = f"{where}." if where else ""
    for name, value in content.items():
        if name not in known:
            yield f"{path}{name} is unknown{meant(name, known)}; known: {', '.join(known)}"
        elif not known[name][0](value):
            yield f"{path}{name} is {value!r}, expected {known[name][1]}"
    for name in needed:
        if name not in content:
            yield f"{path}{name} is missing"
