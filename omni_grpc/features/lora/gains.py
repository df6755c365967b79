"""Changes of parameters that are no matrices: gains and biases of norms, and tables of modulation. Each row has its own
value of them, the model's plus what its request's adapters add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.features.lora.layer import owner_loras
from omni_grpc.loading.adapters.binding import Change
from omni_grpc.loading.adapters.deltas import TABLE, Vector
from omni_grpc.loading.checkpoint import target
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.norms import AcrossHeadsNorm, Float32LayerNorm
from omni_grpc.nn.row_changes import CHILD, RowChanges
from omni_grpc.nn.rows import Owner, Rows
from omni_grpc.types.lora import Lora
from omni_grpc.types.spec import WeightMap

INSTEAD = "use a file without it, or fold it into the checkpoint with omni-grpc lora merge"

NORMS = (nn.RMSNorm, AcrossHeadsNorm, Float32LayerNorm)


@dataclasses.dataclass(frozen=True, slots=True)
class VectorUpdate:
    """float32 values, of the shape of the parameter `leaf`, times `scale`; with `replaces`, what they are beyond it."""

    leaf: str
    values: Tensor
    scale: float
    replaces: bool

    def to(self, parameter: Tensor) -> Tensor:
        return self.scale * (self.values - parameter if self.replaces else self.values)


class Gains(RowChanges):
    """What adapters add to the parameters of one module; `added` has it by Lora.key."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component
        self.added: dict[str, list[VectorUpdate]] = {}

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return owner_loras

    def put(self, key: str, updates: Sequence[VectorUpdate]) -> None:
        """Takes an adapter's changes, on the device. What had this key before is gone."""
        self.added[key] = list(updates)

    def remove(self, key: str) -> None:
        """Drops an adapter, if it is there."""
        self.added.pop(key, None)

    def any(self, leaf: str, rows: Rows) -> bool:
        return bool(self.added) and any(True for owner in rows.owners for _ in self._of(leaf, owner))

    def values(self, leaf: str, parameter: Tensor, rows: Rows) -> list[Tensor]:
        plain, found = parameter.detach().float(), []
        for owner in rows.owners:
            value = plain
            for update, scale in self._of(leaf, owner):
                value = torch.add(value, update.to(plain), alpha=scale)
            found.append(value)
        return found

    def _of(self, leaf: str, owner: Owner) -> Iterator[tuple[VectorUpdate, float]]:
        for lora in owner_loras(owner):
            if lora.scale and lora.target in ("", self.component):
                yield from ((update, lora.scale) for update in self.added.get(lora.key, ()) if update.leaf == leaf)


def is_norm(module: nn.Module) -> bool:
    """Whether it has a vector for weight."""
    weight = module._parameters.get("weight")
    return not isinstance(module, AnyLinear) and weight is not None and weight.dim() == 1


def size(norm: nn.Module) -> tuple[int, ...]:
    """[channels]."""
    return tuple(cast(Tensor, norm.weight).shape)


def tables(module: nn.Module, context: Context) -> dict[str, tuple[int, ...]]:
    """The tables of modulation of a denoiser: their names in the checkpoint and shapes."""
    # the last modulation has a module of its own in some checkpoints, without weights
    owners = {"", "norm_out"}
    for name in context.places:
        parts = name.split(".")
        owners |= {".".join(parts[:count]) for count in range(1, len(parts))}
    found = {}
    for owner in sorted(owners):
        name = f"{owner}.{TABLE}" if owner else TABLE
        if (parameter := _parameter(module, _place(name, context))) is not None:
            found[name] = tuple(parameter.shape)
    return found


def fault(module: nn.Module, delta: Vector, name: str, context: Context) -> str:
    """Why rows cannot have their own of what the checkpoint calls `name`, "" if they can."""
    path, leaf = _where(delta, name, context)
    if delta.leaf == TABLE:
        named, parent = leaf, module.get_submodule(path)
    else:
        parent_path, _, named = path.rpartition(".")
        parent = module.get_submodule(parent_path)
    owner = module.get_submodule(path)
    if named not in getattr(parent, "row_parameters", ()) or (delta.leaf != TABLE and not isinstance(owner, NORMS)):
        return f"requests cannot have their own {leaf} of {name}; {INSTEAD}"
    if getattr(owner, leaf, None) is None:
        return f"{name} of the model has no {leaf}; use a file without it"
    if context.batch_invariant and delta.leaf != TABLE:
        why = f"with a changed norm, {name}, all rows of a batch compute theirs otherwise; leave out --batch-invariant"
        return f"{why}, or {INSTEAD}"
    return ""


def placed(delta: Vector, change: Change, context: Context) -> tuple[str, VectorUpdate]:
    """An adapter's change of a norm or of a table, and the path of the module that has it."""
    path, leaf = _where(delta, change.parts[0].module, context)
    return path, VectorUpdate(leaf, delta.values.float(), change.scale, delta.replaces)


def _where(delta: Vector, name: str, context: Context) -> tuple[str, str]:
    """The path of the module that has a parameter, and what it calls it."""
    if delta.leaf != TABLE:
        return context.places[name].path, delta.leaf
    path, _, leaf = _place(name, context).rpartition(".")
    return path, leaf


def holder(module: nn.Module, path: str, component: str) -> Gains:
    """What has the changes of the parameters of the module at a path; it is put there if it is not yet."""
    owner = module.get_submodule(path)
    found = owner._modules.get(CHILD)
    if not isinstance(found, Gains):
        found = Gains(component)
        owner.add_module(CHILD, found)
    return found


def _place(name: str, context: Context) -> str:
    """The path of a parameter by its name in the checkpoint."""
    return target(name, context.spec.weights.get(context.component, WeightMap()))[0]


def _parameter(module: nn.Module, path: str) -> Tensor | None:
    owner, _, leaf = path.rpartition(".")
    try:
        found = module.get_submodule(owner)
    except AttributeError:
        return None
    return cast("Tensor | None", found._parameters.get(leaf))
