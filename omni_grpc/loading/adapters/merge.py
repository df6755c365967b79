"""Adapters folded into the weights of a checkpoint: `python -m omni_grpc lora merge`.

Sums are in float32, and are rounded once, to the dtype that the checkpoint has. Memory holds one layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from omni_grpc.checkpoint import layout
from omni_grpc.loading.adapters.binding import OTHER, Bound, Change, Layers, Part
from omni_grpc.loading.adapters.deltas import TABLE, Bias, Delta, Dense, Kron, LowRank, Vector
from omni_grpc.loading.adapters.files import AdapterFile, refused
from omni_grpc.loading.adapters.rewrite import DTYPES, rewrite
from omni_grpc.loading.adapters.targets import bind_targets, read_files, warnings
from omni_grpc.loading.sources import check_scheme
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint

MERGED = "omni_grpc_merged"
"""Where the header of a weight file says what was merged into it, as JSON."""
RECORD = "lora_merge.json"
"""The file of a merged checkpoint that says the same of all of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """An adapter to merge: its file or folder, the strength, and the component it is for ("": those that it names, or
    each that has its layers).
    """

    path: Path
    scale: float = 1.0
    component: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Bound:
    fold: Fold
    file: AdapterFile
    by_component: Mapping[str, Bound]
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one adapter makes of a tensor of the checkpoint: the part `part` of `change`, `scale` times. `order` is the
    same for all parts of a change, and rises from change to change.
    """

    order: int
    scale: float
    change: Change
    part: Part


Plan = Mapping[str, Sequence[Step]]
"""The tensors that change, each with its steps in order."""


class Weights:
    """The tensors of one component, in whichever of its files they are."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder, self.files = folder, files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.places: dict[str, Path] = {}
        for file in files:
            with _open(file) as handle:
                for key in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    part = handle.get_slice(key)
                    self.shapes[key], self.dtypes[key] = tuple(part.get_shape()), part.get_dtype()
                    self.places[key] = file

    @property
    def layers(self) -> Layers:
        """The modules that have a weight, and tables of modulation. A convolution of patches is a linear layer here, as
        it is where models run.
        """
        found: dict[str, tuple[int, ...] | None] = {}
        for key, shape in self.shapes.items():
            if key.endswith(".weight"):
                found[key.removesuffix(".weight")] = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape
            elif key.endswith(TABLE):
                found[key] = shape
        return found

    def read(self, key: str) -> Tensor:
        """float32; a weight is [out, in] or [out]."""
        with _open(self.places[key]) as handle:
            tensor: Tensor = handle.get_tensor(key).float()
        return tensor.flatten(1) if tensor.dim() > 1 and key.endswith(".weight") else tensor

    def check_full_precision(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError where they are quantized. `config` is the component's."""
        check_scheme(config, self.folder)
        codes = sorted({dtype for dtype in self.dtypes.values() if dtype not in (*DTYPES, "I64", "BOOL")})
        if codes or config.get("quantization_config"):
            raise CheckpointError(
                f"{self.folder} is quantized ({', '.join(codes) or 'quantization_config'}); take the checkpoint in "
                "full precision, and quantize the result",
                reason="QUANTIZATION_NOT_SUPPORTED",
            )


def _open(file: Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {plain(error)}") from error


def merge(checkpoint: Checkpoint, folds: Sequence[Fold], target: Path, *, link: bool = False) -> dict[str, Any]:
    """Writes `target`, which must not exist yet: the checkpoint with adapters folded in, one after the other. What no
    adapter changes is copied, or hard-linked with `link`.

    Returns what was merged, as data for JSON; it is in `lora_merge.json` of the target too. Raises CheckpointError for
    a checkpoint that cannot be changed, and ConfigError for an adapter that does not fit it or changes nothing;
    `target` is then not made.
    """
    if target.exists():
        raise CheckpointError(f"{target} already exists; name a new folder")
    components = components_of(checkpoint)
    bound = [_bind(checkpoint, fold, components) for fold in folds]
    plans = {name: _plan(name, weights, bound) for name, weights in components.items()}
    for name in filter(plans.get, plans):
        components[name].check_full_precision(checkpoint.configs.get(name, {}))
    record = _record(checkpoint, bound)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        stale = _stale(checkpoint, components, plans)
        _write(checkpoint, components, plans, unfinished, stale, record["merged"], link=link)
        record["tensors"] = {name: len(plan) for name, plan in plans.items() if plan}
        record["left_out"] = [path.relative_to(checkpoint.path).as_posix() for path in stale]
        (unfinished / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.path} is not merged to {target}: {plain(error)}; nothing of it is left",
            reason="FILE_NOT_WRITTEN",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return record


def components_of(checkpoint: Checkpoint) -> dict[str, Weights]:
    """The denoisers and text encoders of a checkpoint. Raises CheckpointError for a model that is not native, whose
    layers are not known.
    """
    if not checkpoint.spec.weights:
        raise CheckpointError(
            f"{checkpoint.path} is a checkpoint of {checkpoint.spec.name}, which runs through diffusers; this needs a "
            "native model, whose layers are known"
        )
    found = {}
    for name, files in weight_files(checkpoint).items():
        if name in checkpoint.spec.weights or name.startswith("text_encoder"):
            found[name] = Weights(checkpoint.path / name, files)
    return found


def weight_files(checkpoint: Checkpoint) -> dict[str, list[Path]]:
    """The files that each component's weights are loaded from. Raises CheckpointError where one has none."""
    folder = checkpoint.path

    def read(file: str) -> Mapping[str, Any]:
        content: Mapping[str, Any] = read_json((folder / file).read_text(encoding="utf-8"))
        return content

    chosen = layout.weights(read(layout.INDEX), layout.files_of(folder), str(folder), read)
    return {one.component: [folder / file for file in one.files if file.endswith(".safetensors")] for one in chosen}


def _bind(checkpoint: Checkpoint, fold: Fold, components: Mapping[str, Weights]) -> _Bound:
    name = fold.path.stem
    if not math.isfinite(fold.scale) or not fold.scale:
        raise refused(name, f"scale {fold.scale:g} changes nothing that could be stored; give a finite one, not 0")
    if fold.component and fold.component not in components:
        raise refused(name, f"{fold.component!r} is no component of the model; it has {', '.join(components)}")
    denoisers = tuple(component for component in components if component in checkpoint.spec.weights)
    file = read_files(name, {fold.component: fold.path})
    by_component = {}
    for component, weights in components.items():
        by_component[component] = bind_targets(
            name,
            file,
            component,
            weights.layers,
            layouts=checkpoint.spec.layouts,
            components=denoisers,
            denoisers=denoisers,
        )
        by_component[component].check(name)
    if not any(bound.changes for bound in by_component.values()):
        why = sorted({why for bound in by_component.values() for why in bound.skipped.values()})
        raise refused(name, f"no key of {file.path.name} changes the model ({', '.join(why)})")
    return _Bound(fold, file, by_component, warnings(file, denoisers))


def _plan(component: str, weights: Weights, bound: Sequence[_Bound]) -> Plan:
    """Raises CheckpointError for a change of what the checkpoint does not have."""
    plan: dict[str, list[Step]] = {}
    pairs = [(one, change) for one in bound for change in one.by_component[component].changes]
    for order, (one, change) in enumerate(pairs):
        for part in change.parts:
            key = _key(change.delta, part.module)
            if key not in weights.shapes:
                raise CheckpointError(
                    f"{change.keys[0]} of {one.file.path.name} changes {key}, which is not in "
                    f"{weights.folder}; load the adapter instead of merging it"
                )
            plan.setdefault(key, []).append(Step(order, one.fold.scale * change.scale, change, part))
    return plan


def _key(delta: Delta, module: str) -> str:
    """The tensor of the checkpoint that a change of a module is of."""
    match delta:
        case Vector(leaf):
            return module if leaf == TABLE else f"{module}.{leaf}"
        case Bias():
            return f"{module}.bias"
    return f"{module}.weight"


def _write(
    checkpoint: Checkpoint,
    components: Mapping[str, Weights],
    plans: Mapping[str, Plan],
    target: Path,
    stale: Sequence[Path],
    merged: Sequence[Mapping[str, Any]],
    *,
    link: bool,
) -> None:
    owners = {file: name for name, weights in components.items() for file in weights.files}
    for file in _walk(checkpoint.path):
        if file in stale:
            continue
        new = target / file.relative_to(checkpoint.path)
        new.parent.mkdir(parents=True, exist_ok=True)
        if (name := owners.get(file)) is not None:
            weights, plan = components[name], plans[name]
            if keys := [key for key in plan if weights.places[key] == file]:
                notes = {MERGED: json.dumps([*_before(file), *merged])}
                value = functools.partial(_value, weights, plan)
                rewrite(file, new, keys, value, notes)
                continue
        if link:
            new.hardlink_to(file.resolve())
        else:
            shutil.copyfile(file, new)


def _value(weights: Weights, plan: Plan, key: str, before: float = math.inf) -> Tensor:
    """A tensor of the checkpoint in float32, [out, in], [out] or a table, after its steps below the order `before`."""
    value = weights.read(key)
    for step in plan.get(key, ()):
        if step.order >= before:
            break
        scale, part, delta = step.scale, step.part, step.change.delta
        match delta:
            case Bias(vector):
                value[part.rows].add_(vector[part.source], alpha=scale)
            case Vector(_, values, replaces):
                other = values.view_as(value).float()
                value = torch.lerp(value, other, scale) if replaces else value.add_(other, alpha=scale)
            case LowRank() | Kron() | Dense():
                value[part.rows].add_(delta.rows(part.source).dense(), alpha=scale)
            case _ if delta.by_rows:
                value[part.rows] = delta.rows(part.source).merged(value[part.rows], scale)
            case _:
                # every row of the new weight depends on all of the old ones, also on those of other modules
                whole = torch.empty(delta.shape)
                for one in step.change.parts:
                    old = _value(weights, plan, f"{one.module}.weight", step.order)
                    whole[one.source] = old[one.rows]
                value[part.rows] = delta.merged(whole, scale)[part.source]
    return value


def _before(file: Path) -> list[dict[str, Any]]:
    """What was merged into a file before."""
    with _open(file) as handle:
        text = (handle.metadata() or {}).get(MERGED, "[]")
    with contextlib.suppress(ValueError):
        if isinstance(found := read_json(text), list):
            return found
    return []


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder, hidden ones left out."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def _stale(checkpoint: Checkpoint, components: Mapping[str, Weights], plans: Mapping[str, Plan]) -> list[Path]:
    """Other weight files of the components that change, which would still have the old weights."""
    found = []
    for name, weights in components.items():
        if not plans[name]:
            continue
        mine = {path.name for path in weights.files}
        for path in sorted(weights.folder.iterdir()):
            if path.name.endswith(".index.json"):
                other = not mine >= set(layout.shards(read_json(path.read_text(encoding="utf-8")), str(path)))
            else:
                other = path.suffix in (".safetensors", ".gguf", *layout.PICKLES) and path.name not in mine
            if other:
                found.append(path)
    return found


def _record(checkpoint: Checkpoint, bound: Sequence[_Bound]) -> dict[str, Any]:
    """What is merged, and what is not and why."""
    merged = [
        {
            "file": one.file.path.name,
            "sha256": one.file.sha256,
            "scale": one.fold.scale,
            "format": one.file.format,
            "keys": {component: len(bound.keys) for component, bound in one.by_component.items() if bound.keys},
        }
        for one in bound
    ]
    skipped: dict[str, str] = {}
    for one in bound:
        used = {key for bound in one.by_component.values() for key in bound.keys}
        for bound_ in one.by_component.values():
            skipped |= {key: why for key, why in bound_.skipped.items() if key not in used and why != OTHER}
    return {
        "base": checkpoint.name,
        "pipeline": checkpoint.spec.name,
        "merged": merged,
        "skipped": skipped,
        "warnings": [text for one in bound for text in one.warnings],
    }
