"""What an adapter changes of a module, as the pair of factors that PEFT takes: down [r, in], up [out, r], one alpha."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from omni_grpc.loading.adapters.binding import Change, Layers
from omni_grpc.loading.adapters.deltas import Bias, Dense, LowRank

Shapes = Mapping[str, tuple[int, ...] | None]
"""The modules of a component that have a weight, by path: the weight's shape where PEFT can change it, else None."""


class NotForPeft(Exception):
    """A change that PEFT's LoRA layers cannot make; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """up @ down * alpha / r is added to the weight, and bias [out] * alpha / r to the bias."""

    down: Tensor
    up: Tensor
    bias: Tensor | None
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.down, self.up, self.bias) if tensor is not None)


def shapes(component: nn.Module) -> Shapes:
    """Of a component without adapters. A quantized weight is told by what it stands for."""
    found: dict[str, tuple[int, ...] | None] = {}
    for path, module in component.named_modules():
        if isinstance(module, nn.Linear):
            found[path] = module.out_features, module.in_features
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            found[path] = module.out_channels, module.in_channels, *module.kernel_size
        elif isinstance(getattr(module, "weight", None), Tensor):
            found[path] = None
    return found


def as_layers(found: Shapes) -> Layers:
    """As the reader of files takes them: a convolution is a product with its patch in one row."""
    return {path: None if shape is None else (shape[0], torch.Size(shape[1:]).numel()) for path, shape in found.items()}


def factors(changes: Iterable[Change], known: Shapes) -> dict[str, Factors]:
    """The changes of one adapter by module, in float32 as far as it was not in the file. Several of one module become
    one, of the sum of their ranks. Raises NotForPeft.
    """
    low: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    biases: dict[str, list[tuple[Tensor, float]]] = {}
    for change in changes:
        for path in dict.fromkeys(part.module for part in change.parts):
            shape = known[path]
            assert shape is not None, "the reader refuses others"
            match change.delta:
                case LowRank(down, up):
                    low.setdefault(path, []).append((*_used(down, _rows(change, path, up, shape[0])), change.scale))
                case Dense(weight):
                    # the shorter side is the rank, beside an identity
                    rows = _rows(change, path, weight, shape[0])
                    wide = rows.shape[0] <= rows.shape[1]
                    pair = (rows, torch.eye(rows.shape[0])) if wide else (torch.eye(rows.shape[1]), rows)
                    low.setdefault(path, []).append((*pair, change.scale))
                case Bias(vector):
                    biases.setdefault(path, []).append((_rows(change, path, vector, shape[0]), change.scale))
                case _:
                    raise NotForPeft(
                        f"{change.layer} is a {change.kind}, which diffusers pipelines do not take here; extract a "
                        "LoRA from it, or merge it into the checkpoint"
                    )
    made = {}
    for path in dict.fromkeys((*low, *biases)):
        shape = known[path]
        assert shape is not None
        made[path] = _joined(low.get(path, ()), biases.get(path, ()), shape)
    return made


def config(made: Mapping[str, Factors]) -> LoraConfig:
    """PEFT's config, which says rank and alpha of each module by its whole path."""
    exactly = {path: f"^{re.escape(path)}" for path in made}
    return LoraConfig(
        r=max(one.rank for one in made.values()),
        lora_alpha=1,
        target_modules=list(made),
        rank_pattern={exactly[path]: one.rank for path, one in made.items()},
        alpha_pattern={exactly[path]: one.alpha for path, one in made.items()},
        lora_bias=any(one.bias is not None for one in made.values()),
        inference_mode=True,
    )


def tensors(made: Mapping[str, Factors], component: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """By PEFT's names. PEFT gives them the dtype of the weight that they belong to; `dtype` is for those beside a
    weight that has none to compute in, since it is quantized.
    """
    with_bias = any(one.bias is not None for one in made.values())
    found: dict[str, Tensor] = {}
    for path, one in made.items():
        weight: Any = component.get_submodule(path).weight
        wanted = torch.float32 if weight.dtype.is_floating_point else dtype
        found[f"{path}.lora_A.weight"] = one.down.to(wanted).contiguous()
        found[f"{path}.lora_B.weight"] = one.up.to(wanted).contiguous()
        if with_bias:
            bias = torch.zeros(one.up.shape[0]) if one.bias is None else one.bias
            found[f"{path}.lora_B.bias"] = bias.to(wanted).contiguous()
    return found


def _rows(change: Change, path: str, source: Tensor, rows: int) -> Tensor:
    """The rows of a change that are a module's, where they are in its weight; zeros in the others."""
    parts = [part for part in change.parts if part.module == path]
    if len(parts) == 1 and (parts[0].rows.start, parts[0].rows.stop) == (0, rows):
        return source[parts[0].source]
    placed = source.new_zeros(rows, *source.shape[1:])
    for part in parts:
        placed[part.rows] = source[part.source]
    return placed


def _used(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Without the factors of the other modules of a fused layer, which may lie beside this one's."""
    used = up.any(0)
    return (down[used], up[:, used]) if used.any() and not used.all() else (down, up)


def _joined(
    low: Sequence[tuple[Tensor, Tensor, float]], biases: Sequence[tuple[Tensor, float]], shape: tuple[int, ...]
) -> Factors:
    effective = [(down, up, scale) for down, up, scale in low if scale]
    if len(effective) == 1:
        ((down, up, scale),) = effective
    elif effective:
        down = torch.cat([down for down, _, _ in effective])
        up, scale = torch.cat([up * scale for _, up, scale in effective], 1), 1.0
    else:
        down, up, scale = torch.zeros(1, torch.Size(shape[1:]).numel()), torch.zeros(shape[0], 1), 1.0
    rank = down.shape[0]
    # PEFT scales it with the factors
    shifts = [vector if own == scale else vector * (own / scale) for vector, own in biases]
    bias = torch.stack(shifts).sum(0) if len(shifts) > 1 else shifts[0] if shifts else None
    return Factors(
        down.reshape(rank, *shape[1:]), up.reshape(shape[0], rank, *(1 for _ in shape[2:])), bias, scale * rank
    )
