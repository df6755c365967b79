"""What is in the file of an adapter, and what of it a model would take: `python -m omni_grpc lora inspect`."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.sizes import header
from omni_grpc.loading.adapters.binding import OTHER, Bound, Layers
from omni_grpc.loading.adapters.deltas import TABLE, Dense, Whole, is_rescaling
from omni_grpc.loading.adapters.encoder_names import named_encoder
from omni_grpc.loading.adapters.files import AdapterFile, for_layer, read_adapter
from omni_grpc.loading.adapters.keys import Entry
from omni_grpc.loading.adapters.names import Names, plain
from omni_grpc.loading.adapters.targets import bind_targets, warnings
from omni_grpc.loading.checkpoint import weight_shapes
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.spec import Checkpoint


def inspect(path: Path, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """What is in a file, and what it would change of a model, as data for JSON.

    Raises ConfigError for a file that is no adapter, CheckpointError for a model that is not native.
    """
    file = read_adapter(path.stem, path)
    report: dict[str, Any] = {
        "file": str(file.path),
        "format": file.format,
        "size_bytes": file.size_bytes,
        "sha256": file.sha256,
        "keys": len(file.keys),
        "kinds": dict(collections.Counter(entry.kind for entry in file.entries.values())),
        "ranks": sorted({entry.rank for entry in file.entries.values() if entry.rank}),
        "alphas": sorted({alpha for entry in file.entries.values() for alpha in [_alpha(file, entry)] if alpha}),
        "components": dict(collections.Counter(_component(entry) for entry in file.entries.values())),
        "layers": {name: _layer(file, entry) for name, entry in file.entries.items()},
        "unknown": list(file.others),
    }
    if checkpoint is not None:
        report["model"] = _beside(file, checkpoint)
    return report


def _layer(file: AdapterFile, entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "rank": entry.rank,
        "alpha": _alpha(file, entry),
        "component": _component(entry),
        "shapes": {key: list(entry.tensors[part].shape) for part, key in entry.keys.items()},
    }


def _alpha(file: AdapterFile, entry: Entry) -> float | None:
    """The alpha of a layer in the file or its config; None where neither has one."""
    if "alpha" in entry.tensors:
        value = float(entry.tensors["alpha"].flatten()[0]) if entry.tensors["alpha"].numel() else math.nan
    else:
        value = float(for_layer(file, plain(entry.layer)).get("lora_alpha") or math.nan)
    return value if math.isfinite(value) else None


def _component(entry: Entry) -> str:
    """As the name of a layer says it; a name that says nothing is any denoiser's."""
    return named_encoder(entry.layer) or Names((), (), ()).find(entry.layer).component or "any denoiser"


def _beside(file: AdapterFile, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a model would take of a file."""
    spec = checkpoint.spec
    if not spec.weights:
        raise CheckpointError(f"{checkpoint.path} runs through diffusers; LoRA adapters need a native model")
    components, beside = tuple(spec.weights), {}
    for component in components:
        if component in checkpoint.configs:
            layers = _layers(checkpoint.path / component)
            beside[component] = bind_targets(
                file.id,
                file,
                component,
                layers,
                layouts=spec.layouts,
                components=components,
                denoisers=checkpoint.denoisers,
            )
    for component in checkpoint.text_encoders:
        layers = _encoder_layers(checkpoint.path / component)
        beside[component] = bind_targets(file.id, file, component, layers, denoisers=checkpoint.denoisers)
    applied = {
        component: _applied(bound)
        for component, bound in beside.items()
        if component in components or bound.changes or bound.refusals
    }
    used = {key for bound in beside.values() for key in bound.keys}
    refusals = {layer: why for bound in beside.values() for layer, why in bound.refusals.items()}
    return {
        "path": str(checkpoint.path),
        "pipeline": spec.name,
        "applied": applied,
        "skipped": _skipped(beside.values()),
        "warnings": list(warnings(file, checkpoint.denoisers)),
        "refused": refusals,
        "works": bool(used) and not refusals,
    }


def _applied(bound: Bound) -> dict[str, Any]:
    """What one component would take. Matrices of whole weights are told by their bytes in bfloat16; so are copies of
    weights, of which a model that keeps several modules as one layer needs more: it copies that layer.
    """
    whole = [change.delta for change in bound.changes if isinstance(change.delta, Dense)]
    copied = [change.delta for change in bound.changes if isinstance(change.delta, Whole)]
    copied = [delta for delta in copied if not is_rescaling(delta)]
    return {
        "keys": len(bound.keys),
        "kinds": dict(collections.Counter(change.kind for change in bound.changes)),
        "layers": {change.layer: [part.module for part in change.parts] for change in bound.changes},
        "bytes_of_whole_weights": sum(2 * math.prod(delta.shape) for delta in whole),
        "bytes_of_copies": sum(2 * math.prod(delta.shape) for delta in copied),
    }


def _layers(folder: Path) -> Layers:
    """As features/lora finds them in the modules: a convolution of patches is a linear layer there."""
    return {
        name: (shape[0], math.prod(shape[1:])) if len(shape) > 1 and not name.endswith(TABLE) else shape
        for name, shape in weight_shapes(folder, TABLE).items()
    }


_NO_LINEAR = re.compile(r"^(model\.)?visual\.|(^|\.)(shared|lm_head|relative_attention_bias|\w*embed(ding|_tokens)s?)$")
"""Matrices of text encoders that are no linear layers, or not of the part that reads prompts."""


def _encoder_layers(folder: Path) -> Layers:
    """The layers of a text encoder by the names in its files, as features/lora finds them in its modules."""
    tensors = {
        name: shape for file in sorted(folder.glob("*.safetensors")) for name, (_, shape) in header(file).items()
    }
    weights = {name.removesuffix(".weight"): shape for name, shape in tensors.items() if name.endswith(".weight")}
    return {
        name: (shape[0], shape[1]) if len(shape) == 2 and not _NO_LINEAR.search(name) else None
        for name, shape in weights.items()
    }


def _skipped(beside: Iterable[Bound]) -> dict[str, str]:
    """Why keys that change nothing of any component do not; one that it is another component's is the last reason."""
    beside = list(beside)
    used = {key for bound in beside for key in bound.keys}
    reasons: dict[str, str] = {}
    for bound in beside:
        reasons |= {key: why for key, why in bound.skipped.items() if why != OTHER or key not in reasons}
    return {key: why for key, why in reasons.items() if key not in used}
