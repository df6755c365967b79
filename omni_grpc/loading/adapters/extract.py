"""A LoRA out of the difference of two checkpoints: `python -m omni_grpc lora extract`.

Each difference of a linear layer is decomposed by SVD in float32 and cut to its largest singular values, which is the
best approximation of that rank (Eckart and Young, https://doi.org/10.1007/BF02288367).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.loading.adapters.deltas import TABLE
from omni_grpc.loading.adapters.files import METADATA
from omni_grpc.loading.adapters.merge import Weights, components_of, weight_files
from omni_grpc.types.errors import CheckpointError, ConfigError, Violation
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_LOOKED_UP = re.compile(r"(?:^|\.)(?:shared|embed_tokens|\w*embedding)$")
"""Layers of text encoders that are tables, which adapters of their libraries do not change."""

NOT_LINEAR = "no linear layer; --full keeps biases, norms and tables of modulation"
NO_FORM = "adapters have no form for it"
OTHER_COMPONENT = "adapters do not change this component"


@dataclasses.dataclass(slots=True)
class _Made:
    """What becomes of the differences so far. Energies are sums of squares."""

    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    layers: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    energy: float = 0.0
    lost: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    rank: int | None
    energy: float | None
    full: bool
    dtype: torch.dtype
    device: torch.device
    denoisers: frozenset[str]


def extract(
    base: Checkpoint,
    tuned: Checkpoint,
    target: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    full: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
) -> dict[str, Any]:
    """Writes `target`, which must not exist yet: an adapter with PEFT's keys that makes `tuned` of `base`, up to `rank`
    for each layer, or as many as keep the share `energy` of the squares of its difference. With `full` biases,
    norms and tables of modulation are in it as they are.

    Returns what was made and what each layer lost, as data for JSON. Raises ConfigError for options that make no sense,
    CheckpointError for two checkpoints that are not the same model, are quantized, or do not differ.
    """
    _check_options(rank, energy, target)
    options = _Options(
        rank=rank,
        energy=energy,
        full=full,
        dtype=DTYPES[dtype],
        device=torch.device(device),
        denoisers=frozenset(base.spec.weights),
    )
    if base.spec.name != tuned.spec.name:
        raise _unlike(base, tuned, f"one is a {base.spec.name}, the other a {tuned.spec.name}")
    mine, theirs = components_of(base), components_of(tuned)
    if mine.keys() != theirs.keys():
        raise _unlike(base, tuned, f"one has {', '.join(mine)}, the other {', '.join(theirs)}")
    for name in mine:
        for checkpoint, weights in ((base, mine[name]), (tuned, theirs[name])):
            weights.check_full_precision(checkpoint.configs.get(name, {}))
        _check_shapes(base, tuned, mine[name], theirs[name])
    made = _Made()
    for name in mine:
        made.layers[name] = {}
        for key in sorted(mine[name].shapes):
            _take(made, name, key, mine[name], theirs[name], options)
    _other_components(made, base, tuned, set(mine))
    if not made.tensors:
        rest = f" but for {', '.join(made.left_out)}" if made.left_out else ""
        raise CheckpointError(f"{tuned.path} has the weights of {base.path}{rest}; there is no difference to extract")
    _save(made, base, tuned, target, options)
    return {
        "base": base.name,
        "tuned": tuned.name,
        "components": {name: layers for name, layers in made.layers.items() if layers},
        "layers": sum(map(len, made.layers.values())),
        "left_out": made.left_out,
        "lost": made.lost / made.energy,
        "size_bytes": target.stat().st_size,
    }


def _check_options(rank: int | None, energy: float | None, target: Path) -> None:
    if rank is None and energy is None:
        raise _refused("rank", "give --rank, --energy, or both")
    if rank is not None and rank < 1:
        raise _refused("rank", f"--rank {rank} is no rank; it must be 1 or more")
    if energy is not None and not 0 < energy <= 1:
        raise _refused("energy", f"--energy {energy:g} is no share; it must be above 0 and at most 1")
    if target.exists():
        raise _refused("out", f"{target} already exists; name a new file")


def _refused(field: str, message: str) -> ConfigError:
    return ConfigError(message, violations=(Violation(field, message),))


def _unlike(base: Checkpoint, tuned: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(f"{base.path} and {tuned.path} are not the same model: {why}")


def _check_shapes(base: Checkpoint, tuned: Checkpoint, mine: Weights, theirs: Weights) -> None:
    if wrong := sorted(
        key for key in mine.shapes.keys() | theirs.shapes.keys() if mine.shapes.get(key) != theirs.shapes.get(key)
    ):
        key, more = wrong[0], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        shapes = (str(shapes.get(key, "nothing")) for shapes in (mine.shapes, theirs.shapes))
        raise _unlike(base, tuned, f"{mine.folder.name} {key} is {' and '.join(shapes)}{more}")


def _take(made: _Made, component: str, key: str, mine: Weights, theirs: Weights, options: _Options) -> None:
    """Takes the difference of one tensor, if there is any."""
    before = mine.read(key)
    difference = theirs.read(key) - before
    if not difference.any():
        return
    squares = float(difference.double().square().sum())
    made.energy += squares
    module, _, leaf = key.rpartition(".")
    name, shape = f"{component}.{module}", mine.shapes[key]
    whole = {("weight", 1): "diff", ("bias", 1): "diff_b"}.get((leaf, len(shape)))
    if leaf == TABLE:
        # of a block, or of what comes after all of them
        name, whole = f"{component}.{module or 'head'}", "diff_m"
    table = component not in options.denoisers and _LOOKED_UP.search(module)
    if leaf == "weight" and len(shape) > 1 and not table:
        noise = float(before.abs().max()) * torch.finfo(torch.float32).eps
        down, up, lost = _factors(difference, noise, options)
        made.lost += lost
        # a convolution of patches has its kernel in the first factor, and a kernel of one pixel in the second
        made.tensors[f"{name}.lora_A.weight"] = _stored(down.view(-1, *shape[1:]), options)
        made.tensors[f"{name}.lora_B.weight"] = _stored(up.view(*up.shape, *(1 for _ in shape[2:])), options)
        made.layers[component][module] = {"rank": down.shape[0], "lost": lost / squares}
    elif whole and options.full:
        made.tensors[f"{name}.{whole}"] = _stored(difference, options)
    else:
        made.lost += squares
        made.left_out[f"{component}.{key}"] = NOT_LINEAR if whole else NO_FORM


def _factors(difference: Tensor, noise: float, options: _Options) -> tuple[Tensor, Tensor, float]:
    """down [r, in], up [out, r], and the squares that their product lacks. Both have the same share of each value.
    `noise` is what float32 may have rounded in an element of the weight.
    """
    u, values, vh = torch.linalg.svd(difference.to(options.device), full_matrices=False)
    squares = values.double().square()
    left = (squares.sum() - squares.cumsum(0)).clamp_min(0)
    rank = len(values)
    if options.energy is not None:
        rank = int((left > (1 - options.energy) * squares.sum()).sum()) + 1
    rank = min(rank, len(values), options.rank or rank)
    # a matrix of noise has singular values up to about (sqrt(out) + sqrt(in)) * noise, and the SVD adds its own: those
    # take no rank
    least = noise * sum(map(math.sqrt, difference.shape))
    least += float(values[0]) * max(difference.shape) * torch.finfo(torch.float32).eps
    rank = max(1, min(rank, int((values > least).sum())))
    root = values[:rank].sqrt()
    return (root[:, None] * vh[:rank]).cpu(), (u[:, :rank] * root).cpu(), float(left[rank - 1])


def _stored(tensor: Tensor, options: _Options) -> Tensor:
    stored = tensor.to(options.dtype)
    if not stored.isfinite().all():
        raise _refused("dtype", "a difference is too large for float16; use --dtype bfloat16 or float32")
    return stored.contiguous()


def _other_components(made: _Made, base: Checkpoint, tuned: Checkpoint, known: set[str]) -> None:
    """Tells of components that differ and that no adapter changes, such as a VAE."""
    mine, theirs = weight_files(base), weight_files(tuned)
    for name in sorted(mine.keys() & theirs.keys() - known):
        ours, other = (
            Weights(checkpoint.path / name, files[name]) for checkpoint, files in ((base, mine), (tuned, theirs))
        )
        same = ours.shapes == other.shapes and all(torch.equal(ours.read(key), other.read(key)) for key in ours.shapes)
        if not same:
            made.left_out[name] = OTHER_COMPONENT


def _save(made: _Made, base: Checkpoint, tuned: Checkpoint, target: Path, options: _Options) -> None:
    """With PEFT's config for each component: alpha is the rank, so that every layer is scaled by 1."""
    config: dict[str, Any] = {}
    for component, layers in made.layers.items():
        if not layers:
            continue
        ranks = {name: layer["rank"] for name, layer in layers.items()}
        usual = max(ranks.values())
        # patterns may match the end of a name: proj_out would be that of every block too
        others = {f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != usual}
        config |= {f"{component}.r": usual, f"{component}.lora_alpha": usual}
        config |= {f"{component}.rank_pattern": others, f"{component}.alpha_pattern": others}
        config[f"{component}.target_modules"] = sorted(layers)
    notes = {
        "base": base.name,
        "tuned": tuned.name,
        "rank": options.rank,
        "energy": options.energy,
        "lost": made.lost / made.energy,
    }
    header = {"format": "pt", METADATA: json.dumps(config), "omni_grpc_extracted": json.dumps(notes)}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(made.tensors, target, header)
    except (OSError, safetensors.SafetensorError) as error:
        target.unlink(missing_ok=True)
        raise CheckpointError(f"{target} is not written: {plain(error)}", reason="FILE_NOT_WRITTEN") from error
