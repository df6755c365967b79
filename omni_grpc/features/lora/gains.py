"""Changes of parameters that are no matrices: gains and biases of norms, and tables of modulation. Each row has its own
value of them, the model's plus what its request's adapters add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.features.lora.layer import owner_loras
from omni_grpc.loading.adapters import refused
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
class Added:
    """float32 values, of the parameter's shape, times `scale`; with `replaces`, what they are beyond it."""

    values: Tensor
    scale: float
    replaces: bool

    def to(self, parameter: Tensor) -> Tensor:
        return self.scale * (self.values - parameter if self.replaces else self.values)


class Gains(RowChanges):
    """What adapters add to the parameters of one module; `added` has it by parameter and by Lora.key."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component
        self.added: dict[str, dict[str, list[Added]]] = {}

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return owner_loras

    def any(self, leaf: str, rows: Rows) -> bool:
        return any(True for owner in rows.owners for _ in self._of(leaf, owner))

    def values(self, leaf: str, parameter: Tensor, rows: Rows) -> list[Tensor]:
        plain, found = parameter.detach().float(), []
        for owner in rows.owners:
            value = plain
            for added, scale in self._of(leaf, owner):
                value = torch.add(value, added.to(plain), alpha=scale)
            found.append(value)
        return found

    def _of(self, leaf: str, owner: Owner) -> Iterator[tuple[Added, float]]:
        mine = self.added.get(leaf, {})
        for lora in owner_loras(owner):
            if lora.scale and lora.target in ("", self.component):
                yield from ((added, lora.scale) for added in mine.get(lora.key, ()))


def is_norm(module: nn.Module) -> bool:
    """Whether it has a vector for weight."""
    weight = module._parameters.get("weight")
    return not isinstance(module, AnyLinear) and weight is not None and weight.dim() == 1


def size(norm: nn.Module) -> tuple[int, ...]:
    """[channels]."""
    return tuple(cast(Tensor, norm.weight).shape)


def tables(module: nn.Module, context: Context) -> dict[str, tuple[int, ...]]:
    """The tables of modulation of a denoiser: their names in the checkpoint and shapes."""
    owners = {""}
    for name in context.places:
        parts = name.split(".")
        owners |= {".".join(parts[:count]) for count in range(1, len(parts))}
    found = {}
    for owner in sorted(owners):
        name = f"{owner}.{TABLE}" if owner else TABLE
        if (parameter := _parameter(module, _place(name, context))) is not None:
            found[name] = tuple(parameter.shape)
    return found


def add(module: nn.Module, key: str, change: Change, context: Context) -> None:
    """Adds an adapter's change of a norm or of a table. Raises ConfigError for the setting `lora` where the model does
    not let rows have their own.
    """
    delta, (part,) = change.delta, change.parts
    assert isinstance(delta, Vector)
    if delta.leaf == TABLE:
        path, leaf = _place(part.module, context).rpartition(".")[::2]
        named, holder = leaf, module.get_submodule(path)
    else:
        path, leaf = context.places[part.module].path, delta.leaf
        holder = module.get_submodule(path.rpartition(".")[0])
        named = path.rpartition(".")[2]
    owner = module.get_submodule(path)
    if named not in getattr(holder, "row_parameters", ()) or (delta.leaf != TABLE and not isinstance(owner, NORMS)):
        why = f"{change.layer} changes {part.module}, of which requests cannot have their own {leaf} here; {INSTEAD}"
        raise refused(key, why)
    if getattr(owner, leaf, None) is None:
        raise refused(key, f"{change.layer} changes the {leaf} of {part.module}, and the model's has none")
    if context.batch_invariant and delta.leaf != TABLE:
        why = f"{change.layer} changes a norm, which makes others of a batch compute it otherwise; leave out "
        raise refused(key, f"{why}--batch-invariant, or {INSTEAD}")
    gains = owner._modules.get(CHILD)
    if not isinstance(gains, Gains):
        gains = Gains(context.component)
        owner.add_module(CHILD, gains)
    values = delta.values.to(context.device, torch.float32)
    gains.added.setdefault(leaf, {}).setdefault(key, []).append(Added(values, change.scale, delta.replaces))


def remove(module: nn.Module, key: str) -> None:
    """Removes an adapter from all norms and tables. No row with it may be running."""
    for part in module.modules():
        if isinstance(part, Gains):
            for mine in part.added.values():
                mine.pop(key, None)


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
