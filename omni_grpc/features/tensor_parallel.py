"""Tensor parallel (https://arxiv.org/abs/1909.08053): each rank has a part of the weights, and all of the tokens.

Which modules are spread, and how, is a table in the model's spec. What follows a column cut (heads, hidden channels) is
local to the rank, until a row cut sums over all ranks. To be applied before weights are loaded and before anything else
edits linear layers: a rank then never has more than its part.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.linear import AnyLinear, Linear, Shard
from omni_grpc.nn.per_head import PerHead
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis
from omni_grpc.types.spec import Split, SplitKind, WeightMap

__all__ = ["apply"]


def apply(module: nn.Module, config: object, context: Context) -> None:
    """Spreads the modules that the spec's table names over the ranks of "tensor".

    Raises ConfigError for a component without a table, and by name for a module that the ranks cannot share evenly.
    """
    group = context.group(Axis.TENSOR, "tensor parallel needs ranks to spread weights over")
    if context.component not in context.spec.tensor_parallel:
        raise ConfigError(
            f"{context.spec.name}: tensor parallel is not served yet for {context.component!r}, of which the spec does "
            "not say what can be spread; spread its tokens instead"
        )
    if context.batch_invariant and dist.get_world_size(group) > 2:
        raise ConfigError(
            "batch_invariant takes a tensor_parallel_size of 2 at most: a sum over more ranks is in an order that "
            "depends on where in the batch a token is"
        )
    weights = context.spec.weights.get(context.component, WeightMap())
    grouped = any(isinstance(child, Attention) and child.num_kv_heads < child.num_heads for child in module.modules())
    for pattern, split in context.spec.tensor_parallel[context.component].items():
        found = [(name, child) for name, child in module.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if not found and not split.optional:
            raise ConfigError(f"{context.spec.name}: no module of {context.component!r} is called {pattern!r}")
        for name, child in found:
            path = f"{context.component}.{name}"
            share = Share(path, _parts(path, split, weights, grouped), group)
            module.set_submodule(name, _SPREAD[split.kind](child, share))


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What this rank has of the module called `name`; `parts` as in spec.Split."""

    name: str
    parts: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def of(self, what: str, count: int) -> int:
        """One rank's share of so many. Raises ConfigError where they cannot be shared evenly."""
        if count % self.size:
            raise ConfigError(
                f"{self.name} has {count} {what}, which {self.size} ranks cannot share evenly; use a tensor parallel "
                f"size that divides {count}"
            )
        return count // self.size

    def slices(self, what: str, channels: int) -> list[slice]:
        """Where this rank's channels are, part by part."""
        if channels % sum(self.parts):
            raise ConfigError(f"{self.name} has {channels} {what}, which are not parts of sizes {self.parts}")
        rank, unit, start, slices = dist.get_rank(self.group), channels // sum(self.parts), 0, []
        for part in self.parts:
            mine = self.of(what, part * unit)
            slices.append(slice(start + rank * mine, start + (rank + 1) * mine))
            start += part * unit
        return slices


class SplitLinear(AnyLinear):
    """Around a linear layer that has this rank's part of the weight: `shard`."""

    def __init__(self, whole: Linear, shard: Shard, *, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.stream = in_features, out_features, whole.stream
        self.shard: Shard = shard
        self._shapes = whole.shapes()
        with whole.weight.device:
            self.inner: AnyLinear = Linear(in_features, out_features, bias, stream=whole.stream)
        self.inner.shard = shard

    @property
    def activation_dtype(self) -> torch.dtype | None:
        return self.inner.activation_dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes


class ColumnLinear(SplitLinear):
    """[T, in] -> this rank's outputs [T, out / P]."""

    def __init__(self, whole: Linear, share: Share) -> None:
        kept = share.slices("output channels", whole.out_features)
        shard = Shard(share.group, (whole.out_features, whole.in_features), outputs=tuple(kept))
        super().__init__(
            whole,
            shard,
            in_features=whole.in_features,
            out_features=share.of("output channels", whole.out_features),
            bias=whole.bias is not None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> this rank's output channels [T, out / P]."""
        out: Tensor = self.inner(x)
        return out

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Keeps this rank's rows of weight [out, in], weight_scale [out] or bias [out]."""
        self.inner.load_tensor(name, torch.cat([tensor[kept] for kept in self.shard.outputs or ()]))


class RowLinear(SplitLinear):
    """This rank's inputs [T, in / P] -> [T, out], summed over the ranks. The bias is added to the sum."""

    def __init__(self, whole: Linear, share: Share) -> None:
        kept = share.slices("input channels", whole.in_features)
        super().__init__(
            whole,
            Shard(share.group, (whole.out_features, whole.in_features), inputs=tuple(kept)),
            in_features=share.of("input channels", whole.in_features),
            out_features=whole.out_features,
            bias=False,
        )
        self.bias = whole.bias

    @property
    def activation_dtype(self) -> None:
        """In 8 bits, a token's scale is that of the channels of all ranks, which the kernels before do not know."""
        return None

    @property
    def stored_dtype(self) -> torch.dtype | None:
        return self.inner.stored_dtype

    def forward(self, x: Tensor) -> Tensor:
        """This rank's input channels x [T, in / P] -> [T, out], all-reduced over the ranks."""
        out: Tensor = self.inner(x)
        dist.all_reduce(out, group=self.shard.group)
        return out if self.bias is None else out + self.bias

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Keeps this rank's columns of weight [out, in]; weight_scale [out] and bias [out] are kept whole."""
        if name == "bias":
            self.bias = nn.Parameter(tensor, requires_grad=False)
        elif tensor.dim() == 1:
            # of the rows, which are all here
            self.inner.load_tensor(name, tensor)
        else:
            self.inner.load_columns(name, tensor, self.shard.inputs or ())


class SplitNorm(nn.Module):
    """RMS norm over the channels of all ranks: x [T, C / P] -> the same. The weight, which is small, is whole."""

    def __init__(self, weight: nn.Parameter, eps: float, share: Share) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        (self.kept,) = share.slices("channels", len(weight))
        self._group = share.group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, C / P] -> [T, C / P] in x's dtype. Computed in float32; the sums of squares are all-reduced."""
        squares = x.float().square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=self._group)
        normed = x.float() * torch.rsqrt(squares / len(self.weight) + self.eps)
        return (normed * self.weight[self.kept].float()).to(x.dtype)


def _column(module: nn.Module, share: Share) -> nn.Module:
    return ColumnLinear(_plain(module, share), share)


def _row(module: nn.Module, share: Share) -> nn.Module:
    return RowLinear(_plain(module, share), share)


def _plain(module: nn.Module, share: Share) -> Linear:
    if not isinstance(module, Linear):
        raise ConfigError(
            f"{share.name} is a {type(module).__name__}, and only a plain Linear can be spread over ranks"
        )
    return module


def _heads(module: nn.Module, share: Share) -> nn.Module:
    if not isinstance(module, Attention):
        raise ConfigError(f"{share.name} is a {type(module).__name__}, which has no heads to share")
    module.num_heads = share.of("heads", module.num_heads)
    module.num_kv_heads = share.of("key/value heads", module.num_kv_heads)
    return module


def _norm(module: nn.Module, share: Share) -> nn.Module:
    """Any RMS norm: its weight is called `weight`, and its epsilon `eps`."""
    return SplitNorm(cast(nn.Parameter, module.weight), cast(float, module.eps), share)


class SplitPerHead(nn.Module):
    """The values of this rank's heads. The weight, which is small, is whole."""

    def __init__(self, whole: PerHead, share: Share) -> None:
        super().__init__()
        self.weight = whole.weight
        (self.kept,) = share.slices("heads", len(whole.weight))

    def forward(self) -> Tensor:
        """[heads / P]."""
        return self.weight[self.kept]


def _per_head(module: nn.Module, share: Share) -> nn.Module:
    if not isinstance(module, PerHead):
        raise ConfigError(f"{share.name} is a {type(module).__name__}, which has no value for each head")
    return module if len(module.weight) == 1 else SplitPerHead(module, share)


_SPREAD: Mapping[SplitKind, Callable[[nn.Module, Share], nn.Module]] = {
    SplitKind.COLUMN: _column,
    SplitKind.ROW: _row,
    SplitKind.HEADS: _heads,
    SplitKind.NORM: _norm,
    SplitKind.PER_HEAD: _per_head,
}


def _parts(name: str, split: Split, weights: WeightMap, grouped: bool) -> tuple[int, ...]:
    """What lies side by side in the channels of the module called `name`, by relative size. See spec.Split.

    Where keys and values have fewer heads than queries, fused projections are not of equal sizes.
    """
    if split.parts or split.kind is not SplitKind.COLUMN:
        return split.parts or (1,)
    fused = next((parts for path, parts in weights.fused.items() if name.endswith(f".{path}")), ("",))
    if grouped and len(fused) > 1:
        raise ConfigError(f"{name} is made of {', '.join(fused)}: with grouped-query attention its Split needs `parts`")
    return (1,) * len(fused)
