"""Parameters that are no matrices (gains of norms, tables of modulation) with values of their own for some rows.

A module that lets rows have such values says so in `row_parameters`: names of its parameters, and of norms among its
children. What a feature adds is a child of that parameter's module, `CHILD`; while no
row of a batch has any, the module computes as if it were not there.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.linear import active
from omni_grpc.nn.rows import MOD, Rows

CHILD = "row_changes"
"""What the child of a module is called that has them."""


class RowChanges(nn.Module, abc.ABC):
    """What is added to parameters of the module that it is a child of, for some rows."""

    @abc.abstractmethod
    def any(self, leaf: str, rows: Rows) -> bool:
        """Whether a row has a parameter other than it is."""

    @abc.abstractmethod
    def values(self, leaf: str, parameter: Tensor, rows: Rows) -> list[Tensor]:
        """The parameter as each row has it, float32 and of its shape."""


def is_changed(owner: nn.Module, leaf: str = "weight") -> bool:
    """Whether one of the active rows has a parameter of `owner` other than it is."""
    changes = owner._modules.get(CHILD)
    return isinstance(changes, RowChanges) and changes.any(leaf, active.get())


def row_values(owner: nn.Module, leaf: str, stream: str) -> Tensor | None:
    """A parameter of `owner` as each token of `stream` has it, float32 [T, *shape]; [1, *shape] in a batch of one row,
    however many tokens it has. None where all rows have it as it is.
    """
    changes = owner._modules.get(CHILD)
    if not isinstance(changes, RowChanges) or not is_changed(owner, leaf):
        return None
    rows = active.get()
    found = changes.values(leaf, cast(Tensor, getattr(owner, leaf)), rows)
    if len(found) == 1:
        return found[0][None]
    lengths = rows.stream(stream).lengths
    return torch.cat([value.expand(length, *value.shape) for value, length in zip(found, lengths, strict=True)])


def table_of(owner: nn.Module, leaf: str) -> Tensor:
    """A table of modulation [1, k, C], or that of each modulation vector, [M, k, C], where rows have others."""
    found = row_values(owner, leaf, MOD)
    return cast(Tensor, getattr(owner, leaf)) if found is None else found.flatten(0, 1)


def normed(norm: nn.Module, x: Tensor, stream: str) -> Tensor:
    """An RMS norm of tokens of `stream`, over the last dimension of x [T, ..., C], with the gain of each row."""
    gain = row_values(norm, "weight", stream)
    if gain is None:
        out: Tensor = norm(x)
        return out
    plain = F.rms_norm(x.float(), gain.shape[1:], None, cast(float, norm.eps))
    return (plain * gain.view(gain.shape[0], *(1,) * (x.dim() - 2), -1)).to(x.dtype)


class Affine(NamedTuple):
    """The arguments of `ops.norm.norm_modulate` for a norm and the modulation after it, [M, C]."""

    scale: Tensor | None
    shift: Tensor | None
    options: dict[str, Any]


def affine(norm: nn.Module, scale: Tensor | None, rows: Rows, *, base: float = 1.0) -> Affine:
    """How a norm with a gain (and a bias) is computed together with the scale [M, C] after it, which is added to
    `base`: as they are, or with what rows have for themselves as a part of the modulation.
    """
    weight, bias = cast(Tensor, norm.weight), cast("Tensor | None", getattr(norm, "bias", None))
    gains = row_values(norm, "weight", MOD)
    biases = None if bias is None else row_values(norm, "bias", MOD)
    if gains is None and biases is None:
        return Affine(scale, None, {"base": base, "weight": weight, "bias": bias})
    shape, dtype = (rows.stream(MOD).total, weight.shape[0]), torch.float32 if scale is None else scale.dtype
    factor = torch.ones((), device=weight.device) if scale is None else base + scale.float()
    made = ((weight.float() if gains is None else gains) * factor).to(dtype).expand(shape)
    if bias is None:
        return Affine(made, None, {"base": 0.0})
    shift = ((bias.float() if biases is None else biases) * factor).to(dtype).expand(shape)
    return Affine(made, shift, {"base": 0.0})


def gate_affine(norm: nn.Module, gate: Tensor) -> tuple[Tensor, Tensor]:
    """`gate` [M, C] and `y_weight` [C] of `ops.norm.gate_add`, for the norm of what is added."""
    weight, gains = cast(Tensor, norm.weight), row_values(norm, "weight", MOD)
    if gains is None:
        return gate, weight
    return (gate.float() * gains).to(gate.dtype), torch.ones_like(weight)
