"""What an adapter makes of a layer, as tensors: one form for each kind of change, whatever the file calls them.

Formulas: LoRA (https://arxiv.org/abs/2106.09685), LoHa (https://arxiv.org/abs/2108.06098) and LoKr
(https://arxiv.org/abs/2309.14859) as LyCORIS and PEFT apply them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from omni_grpc.loading.adapters.keys import Entry
from omni_grpc.loading.adapters.parts import Malformed, NotServed, factor, matrix, number, product, tucker, vector
from omni_grpc.loading.adapters.rotations import rotation
from omni_grpc.loading.adapters.transforms import Dora, Glora, Loha, Replaced, Rotation

MAX_LOHA_RANK = 16
"""A LoHa of rank r is a LoRA of rank r * r, which is worth computing up to 256."""

REFUSED: Mapping[str, str] = {
    "widening": "reshape_weight gives a layer more inputs than the model has; load a checkpoint that has them",
}
"""Kinds that are not served yet, and what works in their place."""


@dataclasses.dataclass(frozen=True, slots=True)
class LowRank:
    """up [out, r] @ down [r, in]."""

    down: Tensor
    up: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    @property
    def is_zero(self) -> bool:
        return not (self.down.any() and self.up.any())

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return self.up.float() @ self.down.float()

    def rows(self, kept: slice) -> LowRank:
        """These rows of it."""
        return LowRank(self.down, self.up[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Kron:
    """The Kronecker product of first [l, m] and second [k, n]: [l * k, m * n]."""

    first: Tensor
    second: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.shape[0] * self.second.shape[0], self.first.shape[1] * self.second.shape[1]

    @property
    def is_zero(self) -> bool:
        return not (self.first.any() and self.second.any())

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return torch.kron(self.first.float(), self.second.float())

    def rows(self, kept: slice) -> Kron | Dense:
        """These rows of it; as a whole matrix, unless they are all."""
        return self if kept == slice(0, self.shape[0]) else Dense(self.dense()[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
    """The whole difference of a weight, [out, in]."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def is_zero(self) -> bool:
        return not self.weight.any()

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return self.weight.float()

    def rows(self, kept: slice) -> Dense:
        """These rows of it."""
        return Dense(self.weight[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Bias:
    """The difference of a bias, [out]."""

    vector: Tensor

    @property
    def shape(self) -> tuple[int]:
        return (self.vector.shape[0],)

    @property
    def is_zero(self) -> bool:
        return not self.vector.any()


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """What is added to a parameter that is no matrix (`leaf`: a gain, a bias, a table of modulation), or with
    `replaces` takes its place. values: of the parameter's shape.
    """

    leaf: str
    values: Tensor
    replaces: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def is_zero(self) -> bool:
        return not self.replaces and not self.values.any()


TABLE = "scale_shift_table"
"""What checkpoints call a block's own part of its modulation."""

Whole = Loha | Dora | Rotation | Glora | Replaced
"""Changes that make a new weight of the layer's, see `transforms`."""

Delta = LowRank | Kron | Dense | Bias | Whole | Vector


def is_rescaling(delta: object) -> bool:
    """Whether its outputs are those of the layer and of two factors, times a number for each: DoRA by output."""
    return isinstance(delta, Dora) and delta.by_output and isinstance(delta.change, LowRank)


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """A change, the factor that its file gives it, and the keys that it was made of."""

    delta: Delta
    scale: float
    keys: tuple[str, ...]


def deltas(
    entry: Entry, config: Mapping[str, Any], names: Iterable[str], shape: tuple[int, int] = (0, 0)
) -> Iterator[Scaled]:
    """What the tensors of a linear layer make of it, in float32. `config` is PEFT's, for this layer; `names` are the
    layer's, which patterns of the config may mean; `shape` is that of its weight, [out, in].

    Raises NotServed for a kind that cannot be applied, Malformed for tensors that do not fit each other.
    """
    if (kind := entry.kind) in REFUSED:
        raise NotServed(REFUSED[kind])
    _check_finite(entry)
    scalar, alpha_keys = _scalar(entry), tuple(key for part, key in entry.keys.items() if part in ("alpha", "scalar"))

    def keys(*parts: str) -> tuple[str, ...]:
        return (*(entry.keys[part] for part in parts if part in entry.keys), *alpha_keys)

    def scaled(delta: LowRank | Kron | Dense | Loha, scale: float, *parts: str) -> Scaled:
        if "magnitude" not in entry.tensors:
            return Scaled(delta, scale, keys(*parts))
        return Scaled(_dora(entry, delta), scale, keys(*parts, "magnitude"))

    names = list(names)
    if {"down", "up"} & entry.keys.keys():
        low = _low_rank(entry)
        rank = entry.rank
        scale = scalar * _alpha(entry, config, names, rank, rs=True)
        yield scaled(low, scale, "down", "mid", "up")
        if "up_bias" in entry.tensors:
            # PEFT has it in the second factor's layer, whose output is scaled
            yield Scaled(Bias(vector(entry, "up_bias")), scale, keys("up_bias"))
    elif "up_bias" in entry.tensors:
        raise Malformed(f"{entry.keys['up_bias']} is of a factor that is not there")
    hada, lokr, glora, turned = (
        [part for part in entry.keys if part.startswith(kind)]
        for kind in ("hada_", "lokr_", "glora_", ("oft_", "boft_", "rescale"))
    )
    if hada:
        change, rank = _loha(entry)
        yield scaled(change, scalar * _alpha(entry, config, names, rank, rs=True), *hada)
    if lokr:
        kron, rank = _lokr(entry, config)
        yield scaled(kron, scalar * (_alpha(entry, config, names, rank, rs=False) if rank else 1.0), *lokr)
    if "diff" in entry.tensors:
        yield scaled(Dense(matrix(entry, "diff")), 1.0, "diff")
    if (glora or turned) and "magnitude" in entry.tensors:
        raise NotServed(f"{entry.keys['magnitude']} rescales what is no sum; merge it into the checkpoint")
    if glora:
        made = _glora(entry, shape)
        yield Scaled(made, scalar * _alpha(entry, config, names, made.a1.shape[1], rs=True), keys(*glora))
    if turned:
        # here alpha is a bound of the angles
        yield Scaled(rotation(entry, config, shape), scalar, keys(*turned))
    if "set_weight" in entry.tensors:
        yield Scaled(Replaced(matrix(entry, "set_weight")), 1.0, keys("set_weight"))
    if "diff_b" in entry.tensors:
        yield Scaled(Bias(vector(entry, "diff_b")), 1.0, keys("diff_b"))


def vectors(entry: Entry, leaf: str) -> Iterator[Scaled]:
    """What the tensors of a layer make of its parameters that are no matrices: of a norm (`leaf` "weight"), or of a
    table. Raises NotServed for a kind that it cannot have, Malformed for values that are not finite.
    """
    _check_finite(entry)
    leaves = {
        **dict.fromkeys(("diff", "w_norm"), ("weight", False)),
        **dict.fromkeys(("diff_b", "b_norm"), ("bias", False)),
        "set_weight": ("weight", True),
        "diff_m": (TABLE, False),
    }
    scalar, alpha_keys = _scalar(entry), tuple(key for part, key in entry.keys.items() if part in ("alpha", "scalar"))
    for part, key in entry.keys.items():
        if part in ("alpha", "scalar"):
            continue
        if part not in leaves or (leaf == TABLE) != (part == "diff_m"):
            raise NotServed(f"{key} is not a change that a {'table' if leaf == TABLE else 'norm'} can have")
        name, replaces = leaves[part]
        yield Scaled(Vector(name, entry.tensors[part].float(), replaces), scalar, (key, *alpha_keys))


def _check_finite(entry: Entry) -> None:
    for part, key in entry.keys.items():
        if not entry.tensors[part].float().isfinite().all():
            raise Malformed(f"{key} has values that are not finite; the file is damaged, get or train it again")


def _low_rank(entry: Entry) -> LowRank | Dense:
    down, up = (factor(entry, part) for part in ("down", "up"))
    if "mid" in entry.tensors:
        return Dense(tucker(entry, "mid", up.flatten(1).T, down).flatten(1))
    return LowRank(*product(entry, down, up))


def _loha(entry: Entry) -> tuple[LowRank | Loha | Dense, int]:
    """(w1_a w1_b) * (w2_a w2_b), element by element, and the rank: up to MAX_LOHA_RANK as the product of factors of
    rank r * r; of a convolution in three factors as a whole, which is small.
    """
    if {"hada_t1", "hada_t2"} & entry.keys.keys():
        kernels = [
            tucker(entry, f"hada_t{n}", factor(entry, f"hada_w{n}_a"), factor(entry, f"hada_w{n}_b")) for n in (1, 2)
        ]
        if kernels[0].shape != kernels[1].shape:
            raise Malformed(f"{entry.layer}: the two products of the LoHa are not of one shape")
        return Dense((kernels[0] * kernels[1]).flatten(1)), entry.rank
    first = product(entry, factor(entry, "hada_w1_b"), factor(entry, "hada_w1_a"))
    second = product(entry, factor(entry, "hada_w2_b"), factor(entry, "hada_w2_a"))
    if first[0].shape[1] != second[0].shape[1] or first[1].shape[0] != second[1].shape[0]:
        raise Malformed(f"{entry.layer}: the two products of the LoHa are not of one shape")
    ranks = first[0].shape[0], second[0].shape[0]
    if max(ranks) > MAX_LOHA_RANK:
        return Loha(*first, *second), ranks[0]
    down = (first[0][:, None] * second[0][None]).flatten(0, 1)
    up = (first[1][:, :, None] * second[1][:, None]).flatten(1)
    return LowRank(down, up), ranks[0]


def _lokr(entry: Entry, config: Mapping[str, Any]) -> tuple[Kron, int]:
    """The two factors, and the rank that alpha is divided by; 0 where both are whole, which are not scaled."""
    factors, rank = [], 0
    for part in ("lokr_w1", "lokr_w2"):
        if part in entry.tensors:
            whole = entry.tensors[part].float()
            factors.append(whole.flatten(1) if whole.dim() > 2 else whole)
        elif part == "lokr_w2" and "lokr_t2" in entry.tensors:
            left, right = (factor(entry, f"{part}_{side}") for side in "ab")
            factors.append(tucker(entry, "lokr_t2", left, right).flatten(1))
            rank = right.shape[0]
        else:
            down, up = product(entry, factor(entry, f"{part}_b"), factor(entry, f"{part}_a"))
            factors.append(up @ down)
            # the second one's where both have one
            rank = down.shape[0]
        if factors[-1].dim() != 2 or not factors[-1].numel():
            raise Malformed(f"{entry.layer}: {part} is {tuple(factors[-1].shape)}, and no matrix")
    if not rank and "alpha" not in entry.tensors and isinstance(config.get("r"), int) and "alpha" in config:
        # PEFT scales them all
        rank = config["r"]
    return Kron(*factors), rank


def _glora(entry: Entry, shape: tuple[int, int]) -> Glora:
    """a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in] for a weight of `shape`; older files have each pair the other way
    round.
    """
    a1, a2, b1, b2 = (factor(entry, f"glora_{part}").flatten(1) for part in ("a1", "a2", "b1", "b2"))
    for made in (Glora(a1, a2, b1, b2), Glora(a2, a1, b2, b1)):
        inner = made.a1.shape[1], made.b1.shape[1]
        outer = made.a1.shape[0], made.a2.shape[1], made.b2.shape[1], made.b1.shape[0]
        if inner == (made.a2.shape[0], made.b2.shape[0]) and outer == (shape[1],) * 3 + (shape[0],):
            return made
    raise Malformed(f"{entry.layer}: a1, a2, b1 and b2 have no products that are {shape}")


def _dora(entry: Entry, change: LowRank | Kron | Dense | Loha) -> Dora:
    """By output where the magnitudes are [out] or [out, 1], as PEFT writes them; by input where they are [1, in]."""
    magnitude, (outputs, inputs) = entry.tensors["magnitude"].float(), change.shape
    found = tuple(magnitude.shape)
    if magnitude.numel() == outputs and found[0] == outputs:
        return Dora(change, magnitude.flatten(), by_output=True)
    if magnitude.numel() == inputs and magnitude.dim() == 2 and found[0] == 1:
        return Dora(change, magnitude.flatten(), by_output=False)
    raise Malformed(f"{entry.keys['magnitude']} is {found}; a weight {(outputs, inputs)} has {outputs} outputs")


def _scalar(entry: Entry) -> float:
    """What LyCORIS multiplies the change by."""
    return number(entry, "scalar") if "scalar" in entry.tensors else 1.0


def _alpha(entry: Entry, config: Mapping[str, Any], names: Iterable[str], rank: int, *, rs: bool) -> float:
    """alpha / rank: the layer's own alpha if it has one, else that of the config, else 1. With PEFT's use_rslora, the
    config's is divided by the square root. LyCORIS and kohya take an alpha of 0 for the rank; and what LyCORIS writes
    for its own rs_lora is multiplied already.
    """
    if "alpha" in entry.tensors:
        return (number(entry, "alpha") or rank) / rank
    alpha = config.get("lora_alpha", config.get("alpha", rank))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) for name in names):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if rs and config.get("use_rslora") else rank)
