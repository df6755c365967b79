"""Presets: settings of a request that belong together, such as those of a distilled adapter. Plain frozen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_grpc.types.lora import Lora
from omni_grpc.types.request import GuidanceDraft

NO_PRESET = "none"
"""What a request names to get no preset, also where its model has a default one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PresetLora:
    """An adapter of a preset, as a request would name it, and its file on the hub (ORG/NAME:FILE); "": nowhere."""

    lora: Lora
    file: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a request gets that names it, as far as the request does not say otherwise. None or empty: not set.

    `pipelines` are the pipeline classes in diffusers that it is for; `configs` what the configs of the checkpoint say
    besides: KEY for an entry of model_index.json, COMPONENT.KEY for one of a component's config. `scheduler_config`
    replaces entries of the scheduler's config. `source` is the address that the values come from.
    """

    name: str
    title: str
    pipelines: tuple[str, ...]
    configs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    source: str = ""
    steps: int | None = None
    sigmas: tuple[float, ...] = ()
    shift: float | None = None
    scheduler: str = ""
    scheduler_config: Mapping[str, object] = dataclasses.field(default_factory=dict)
    guidance: GuidanceDraft = dataclasses.field(default_factory=GuidanceDraft)
    loras: tuple[PresetLora, ...] = ()

    @property
    def scheduled(self) -> bool:
        """Whether it sets anything of the schedule beside the number of steps."""
        return bool(self.sigmas or self.shift is not None or self.scheduler or self.scheduler_config)

    def fits(self, pipeline: str, configs: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether it is for a checkpoint of this pipeline class with these configs. What a config lacks is null; false
        and null are the same.
        """
        return pipeline in self.pipelines and all(
            _entry(configs, key) == (wanted or None) for key, wanted in self.configs.items()
        )


def _entry(configs: Mapping[str, Mapping[str, Any]], key: str) -> object:
    component, _, name = key.rpartition(".")
    return configs.get(component, {}).get(name) or None
