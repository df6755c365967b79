"""Several models of one server: from `models:` of a YAML file, or from --model NAME=DIR given several times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.config.fleet import is_of_model
from omni_grpc.config.sections import EngineConfig, options
from omni_grpc.types.errors import ConfigError, Violation

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.ASCII)


def named(value: str) -> dict[str, str]:
    """The settings of `--model`: NAME=DIR, or a folder or hub name alone."""
    match = None if Path(value).exists() else _NAMED.fullmatch(value)
    return {"model": value} if match is None else {"served_model_name": match[1], "model": match[2]}


def configs(values: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[EngineConfig]:
    """The configuration of each model: `values` are those of the server, and of each model that does not have its own.
    Without entries, one model. Raises ConfigError.
    """
    if not entries:
        return [EngineConfig.from_settings(**values)]
    if "served_model_name" in values:
        raise _refusal("served_model_name", "names one model, and there are several; give each its own name")
    known = {option.name: option for option in options()}
    for entry in entries:
        if strays := [name for name in entry if not is_of_model(known[name])]:
            raise _refusal(strays[0], "is a setting of the whole server, not of one of its models; put it outside")
    return [EngineConfig.from_settings(**{**values, **entry}) for entry in entries]


def _refusal(name: str, rule: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} {rule}", violations=(Violation(name, rule),))
