"""What this installation can serve, by its registry and its rules for settings: no server, checkpoint or torch is
needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.registry import specs
from omni_grpc.config import EngineConfig
from omni_grpc.feature_rules.table import FEATURES
from omni_grpc.resolve.settings import check_settings
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY, opaque_spec
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.spec import Checkpoint, ModelSpec

ANY_OTHER = "any other"
"""Stands for every diffusers pipeline that is not native."""
BY_CHECKPOINT = "by checkpoint"
"""Where only the configs of a checkpoint, or the loaded pipeline, can tell."""

Record = dict[str, Any]


def native_models(*, features: bool = False) -> list[Record]:
    """A record for each pipeline class that is served natively: pipeline, family, tasks and readme (None: there is no
    such file); with `features` also what can be turned on, and then one more record for all other pipelines.
    """
    records = [_record(spec) for _, spec in sorted(specs().items())]
    if features:
        known = [*(spec for _, spec in sorted(specs().items())), opaque_spec(ANY_OTHER)]
        records.append({"pipeline": ANY_OTHER, "family": OPAQUE_FAMILY, "tasks": [], "readme": None})
        for record, spec in zip(records, known, strict=True):
            record["features"] = _features(spec)
    return records


def models_table(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The head and a row for each record."""
    rows = [(r["pipeline"], r["family"], ", ".join(r["tasks"]), r["readme"] or "-") for r in records]
    return [("PIPELINE", "FAMILY", "TASKS", "README"), *rows]


def features_table(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The same for what can be turned on."""
    names = list(records[0]["features"])
    head = ("PIPELINE", *(name.upper().replace("_", " ") for name in names))
    return [head, *((record["pipeline"], *(_cell(record["features"][name]) for name in names)) for record in records)]


def _record(spec: ModelSpec) -> Record:
    module = importlib.import_module(spec.pipeline.partition(":")[0].rpartition(".")[0])
    readme = Path(module.__file__ or "").with_name("README.md")
    here = Path.cwd()
    shown = readme.relative_to(here) if readme.is_relative_to(here) else readme
    return {
        "pipeline": spec.name,
        "family": spec.family,
        "tasks": [task.value for task in spec.tasks],
        "readme": str(shown) if readme.is_file() else None,
    }


def _features(spec: ModelSpec) -> Record:
    native = spec.family != OPAQUE_FAMILY
    kinds = spec.guidance
    return {
        **_declared(spec),
        "component_offload": _takes(spec, enable_cpu_offload=True),
        "tensor_parallel": bool(spec.tensor_parallel),
        "guidance": BY_CHECKPOINT if callable(kinds) or not native else [kind.value for kind in kinds],
        "schedulers": list(spec.schedulers),
    }


def _declared(spec: ModelSpec) -> Record:
    """A column for what features declare: the variants that the model takes, or whether it takes the only one."""
    columns: Record = {}
    for feature in FEATURES:
        taken = {name: _takes(spec, **settings) for name, settings in feature.variants(spec).items()}
        if taken.keys() == {""}:
            columns[feature.column] = taken[""]
        elif taken:
            columns.setdefault(feature.column, []).extend(name for name, takes in taken.items() if takes)
    return columns


def _takes(spec: ModelSpec, **settings: Any) -> bool:
    """Whether a server of such a model starts with these settings, as far as its spec decides it."""
    config = EngineConfig.from_settings(model=spec.name, **settings)
    configs: dict[str, dict[str, Any]] = {component: {} for component in spec.weights}
    try:
        check_settings(config, Checkpoint(name=spec.name, path=Path(), spec=spec, configs=configs))
    except ConfigError:
        return False
    return True


def _cell(value: bool | str | Sequence[str]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else ", ".join(value) or "-"
