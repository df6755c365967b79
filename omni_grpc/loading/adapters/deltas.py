"""What an adapter adds to a layer, as tensors: one form for each kind of change, whatever the file calls them.

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

MAX_LOHA_RANK = 16
"""A LoHa of rank r is a LoRA of rank r * r, which is worth computing up to 256."""

_INSTEAD = "merge it into the checkpoint, or extract a LoRA from it"
REFUSED: Mapping[str, str] = {
    "DoRA": f"DoRA rescales the outputs of the whole layer; {_INSTEAD}",
    "OFT": f"OFT rotates the layer's weight; {_INSTEAD}",
    "BOFT": f"BOFT rotates the layer's weight; {_INSTEAD}",
    "GLoRA": f"GLoRA multiplies the layer's weight; {_INSTEAD}",
    "diff_m": "diff_m changes a table of modulation, not a linear layer; use a file without it, or merge it",
    "norm diff": "it changes a norm, not a linear layer; use a file without it, or merge it",
    "set_weight": "set_weight replaces a weight; load a checkpoint that has it",
    "widening": "reshape_weight gives a layer more inputs than the model has; load a checkpoint that has them",
}
"""Kinds that are not served yet, and what works in their place."""


class NotServed(Exception):
    """A change that cannot be made row by row; the text says why."""


class Malformed(Exception):
    """Tensors that are no such change; the text says why."""


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
        return self.up @ self.down


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
        return torch.kron(self.first, self.second)


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
        return self.weight


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


Delta = LowRank | Kron | Dense | Bias


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """A change, the factor that its file gives it, and the keys that it was made of."""

    delta: Delta
    scale: float
    keys: tuple[str, ...]


def deltas(entry: Entry, config: Mapping[str, Any], names: Iterable[str]) -> Iterator[Scaled]:
    """What the tensors of a linear layer add to it, in float32. `config` is PEFT's, for this layer; `names` are the
    layer's, which patterns of the config may mean.

    Raises NotServed for a kind that cannot be applied row by row, Malformed for tensors that do not fit each other.
    """
    if (kind := entry.kind) in REFUSED:
        raise NotServed(REFUSED[kind])
    for part, key in entry.keys.items():
        if not entry.tensors[part].float().isfinite().all():
            raise Malformed(f"{key} has values that are not finite; the file is damaged, get or train it again")
    factor, alpha_keys = _scalar(entry), tuple(key for part, key in entry.keys.items() if part in ("alpha", "scalar"))

    def keys(*parts: str) -> tuple[str, ...]:
        return (*(entry.keys[part] for part in parts if part in entry.keys), *alpha_keys)

    names = list(names)
    if {"down", "up"} & entry.keys.keys():
        low = _low_rank(entry)
        scale = factor * _alpha(entry, config, names, low.down.shape[0], rs=True)
        yield Scaled(low, scale, keys("down", "up"))
        if "up_bias" in entry.tensors:
            # PEFT has it in the second factor's layer, whose output is scaled
            yield Scaled(Bias(_vector(entry, "up_bias")), scale, keys("up_bias"))
    elif "up_bias" in entry.tensors:
        raise Malformed(f"{entry.keys['up_bias']} is of a factor that is not there")
    hada, lokr = ([part for part in entry.keys if part.startswith(kind)] for kind in ("hada_", "lokr_"))
    if hada:
        low, rank = _loha(entry)
        yield Scaled(low, factor * _alpha(entry, config, names, rank, rs=True), keys(*hada))
    if lokr:
        kron, rank = _lokr(entry, config)
        yield Scaled(kron, factor * (_alpha(entry, config, names, rank, rs=False) if rank else 1.0), keys(*lokr))
    if "diff" in entry.tensors:
        weight = entry.tensors["diff"].float()
        yield Scaled(Dense(weight.flatten(1) if weight.dim() > 1 else weight[:, None]), 1.0, keys("diff"))
    if "diff_b" in entry.tensors:
        yield Scaled(Bias(_vector(entry, "diff_b")), 1.0, keys("diff_b"))


def _vector(entry: Entry, part: str) -> Tensor:
    if entry.tensors[part].dim() != 1:
        raise Malformed(f"{entry.keys[part]} is {tuple(entry.tensors[part].shape)}; a bias has one dimension")
    return entry.tensors[part].float()


def _low_rank(entry: Entry) -> LowRank:
    down, up = (_factor(entry, part) for part in ("down", "up"))
    if "mid" in entry.tensors:
        raise NotServed("lora_mid is of a convolution in three factors; extract a LoRA with two of them")
    return LowRank(*_product(entry, down, up))


def _product(entry: Entry, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    rank = down.shape[0] if down.dim() else 0
    found = f"{entry.layer}: factors {tuple(up.shape)} and {tuple(down.shape)}"
    if rank and down.dim() > 2 and up.dim() > 2 and up[0, 0].numel() == 1:
        # a convolution of patches that do not overlap is a product with the patch in one row
        down, up = down.flatten(1), up.flatten(1)
    if down.dim() != 2 or up.dim() != 2 or rank == 0 or up.shape[1] != rank:
        raise Malformed(f"{found} have no product")
    return down, up


def _factor(entry: Entry, part: str) -> Tensor:
    if part not in entry.tensors:
        raise Malformed(f"{entry.layer} has one factor of two, and no {part}")
    return entry.tensors[part].float()


def _loha(entry: Entry) -> tuple[LowRank, int]:
    """(w1_a w1_b) * (w2_a w2_b), element by element, as the product of factors of rank r * r; and r."""
    if {"hada_t1", "hada_t2"} & entry.keys.keys():
        raise NotServed("hada_t1 is of a LoHa of a convolution, which is not served yet; extract a LoRA from it")
    first = _product(entry, _factor(entry, "hada_w1_b"), _factor(entry, "hada_w1_a"))
    second = _product(entry, _factor(entry, "hada_w2_b"), _factor(entry, "hada_w2_a"))
    ranks = first[0].shape[0], second[0].shape[0]
    if max(ranks) > MAX_LOHA_RANK:
        raise NotServed(
            f"a LoHa of rank {max(ranks)} is a LoRA of rank {ranks[0] * ranks[1]}; served up to rank {MAX_LOHA_RANK}, "
            f"above that {_INSTEAD}"
        )
    if first[0].shape[1] != second[0].shape[1] or first[1].shape[0] != second[1].shape[0]:
        raise Malformed(f"{entry.layer}: the two products of the LoHa are not of one shape")
    down = (first[0][:, None] * second[0][None]).flatten(0, 1)
    up = (first[1][:, :, None] * second[1][:, None]).flatten(1)
    return LowRank(down, up), ranks[0]


def _lokr(entry: Entry, config: Mapping[str, Any]) -> tuple[Kron, int]:
    """The two factors, and the rank that alpha is divided by; 0 where both are whole, which are not scaled."""
    if "lokr_t2" in entry.keys:
        raise NotServed("lokr_t2 is of a LoKr of a convolution, which is not served yet; extract a LoRA from it")
    factors, rank = [], 0
    for part in ("lokr_w1", "lokr_w2"):
        if part in entry.tensors:
            whole = entry.tensors[part].float()
            factors.append(whole.flatten(1) if whole.dim() > 2 else whole)
        else:
            down, up = _product(entry, _factor(entry, f"{part}_b"), _factor(entry, f"{part}_a"))
            factors.append(up @ down)
            # the second one's where both have one
            rank = down.shape[0]
        if factors[-1].dim() != 2 or not factors[-1].numel():
            raise Malformed(f"{entry.layer}: {part} is {tuple(factors[-1].shape)}, and no matrix")
    if not rank and "alpha" not in entry.tensors and isinstance(config.get("r"), int) and "alpha" in config:
        # PEFT scales them all
        rank = config["r"]
    return Kron(*factors), rank


def _scalar(entry: Entry) -> float:
    """What LyCORIS multiplies the change by."""
    return _number(entry, "scalar") if "scalar" in entry.tensors else 1.0


def _number(entry: Entry, part: str) -> float:
    if (count := entry.tensors[part].numel()) != 1:
        raise Malformed(f"{entry.keys[part]} has {count} values; {part} is one number for a layer")
    return float(entry.tensors[part].item())


def _alpha(entry: Entry, config: Mapping[str, Any], names: Iterable[str], rank: int, *, rs: bool) -> float:
    """alpha / rank: the layer's own alpha if it has one, else that of the config, else 1. With PEFT's use_rslora, the
    config's is divided by the square root. LyCORIS and kohya take an alpha of 0 for the rank; and what LyCORIS writes
    for its own rs_lora is multiplied already.
    """
    if "alpha" in entry.tensors:
        return (_number(entry, "alpha") or rank) / rank
    alpha = config.get("lora_alpha", config.get("alpha", rank))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) for name in names):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if rs and config.get("use_rslora") else rank)
