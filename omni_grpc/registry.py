"""Which models this installation knows: the folders under `models/` and the entry points of other packages."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.errors import CheckpointError
from omni_grpc.opaque import opaque_spec
from omni_grpc.spec import Checkpoint, ModelSpec

ENTRY_POINT_GROUP = "omni_grpc.models"


def _modules() -> Iterator[Any]:
    import omni_grpc.models as package

    for info in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{info.name}")
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        yield entry_point.load()


@functools.cache
def specs() -> Mapping[str, ModelSpec]:
    """Every known spec by pipeline class name. A name that two packages claim is an error, not a race."""
    found: dict[str, ModelSpec] = {}
    for module in _modules():
        for spec in module.SPECS:
            if spec.name in found:
                family = found[spec.name].family
                raise CheckpointError(
                    f"{module.__name__} registers the pipeline {spec.name!r}, which family {family!r} already serves",
                    reason="DUPLICATE_MODEL",
                )
            found[spec.name] = spec
    return found


def open_checkpoint(path: str | Path, *, name: str | None = None, load_format: str = "auto") -> Checkpoint:
    """Reads the configs of a checkpoint in the diffusers layout and finds the spec for its pipeline class.

    Raises CheckpointError where the folder, its model_index.json or a component's config is missing, or no spec
    serves it.
    """
    folder = Path(path)
    index = _read_json(folder / "model_index.json", f"{folder} is no checkpoint in the diffusers layout")
    pipeline = str(index.get("_class_name", ""))
    spec = None if load_format == "diffusers" else specs().get(pipeline)
    if spec is None and load_format != "native":
        spec = opaque_spec(pipeline)
    if spec is None:
        raise CheckpointError(
            f"{folder} is a checkpoint of {pipeline!r}, which has no native implementation; "
            f"served here: {', '.join(sorted(specs()))}",
            reason="MODEL_NOT_SUPPORTED",
        )
    configs: dict[str, Mapping[str, Any]] = {"": index}
    for component, value in index.items():
        if component.startswith("_") or not isinstance(value, list) or value[0] is None:
            continue
        for file in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
            if (folder / component / file).is_file():
                configs[component] = _read_json(folder / component / file, f"component {component!r}")
                break
        else:
            raise CheckpointError(f"{folder / component} has no config file, but model_index.json names the component")
    return Checkpoint(name=name or folder.resolve().name, path=folder, spec=spec, configs=configs)


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{what}: {path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{what}: {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{what}: {path} holds a JSON {type(content).__name__}, expected an object")
    return content
