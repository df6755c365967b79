"""Changes that make a new weight of a layer's. Rows of requests with such adapters go through a copy of the weight with
the changes merged into it; the others go through the layer itself, in the same forward.

Copies are merged in float32 from the weight that the layer computes with, dequantized where it is quantized, and kept
in the model's dtype: a change that is small beside a step of 8 bits would be rounded away if it were quantized again.

DoRA by output needs no copy: its outputs are those of the layer and of two factors, times a number for each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.features.lora.layer import LoraLinear, owner_loras
from omni_grpc.features.lora.variants import MergedCache
from omni_grpc.loading.adapters import refused
from omni_grpc.loading.adapters.binding import Change, Part
from omni_grpc.loading.adapters.deltas import LowRank, Whole
from omni_grpc.loading.adapters.transforms import Dora, Transform
from omni_grpc.nn.linear import AnyLinear, Elsewhere, activate, active
from omni_grpc.nn.rows import Owner, Rows
from omni_grpc.ops.linear import linear as product
from omni_grpc.ops.quant import gelu_tanh

INSTEAD = "fold it into the checkpoint with omni-grpc lora merge"

Chain = tuple[tuple[str, float], ...]
"""The adapters of a request that make a new weight of a layer, by Lora.key, and their scales, in its order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Rows of a layer's weight, and which rows of the change they are."""

    layer: VariantLinear
    rows: slice
    source: slice


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What an adapter makes of some rows of a layer. `sites` are all the rows that it needs to see, in the order of the
    change, also those of other layers.
    """

    transform: Transform
    scale: float
    sites: tuple[Site, ...]

    def merge(self, layer: VariantLinear, weight: Tensor, before: Chain, scale: float) -> None:
        """Puts its rows into the `weight` of `layer`, float32 [out, in], to which the adapters `before` were applied
        already.
        """
        whole = {site.layer: weight if site.layer is layer else site.layer.merged_weight(before) for site in self.sites}
        made = self.transform.merged(
            torch.cat([whole[site.layer][site.rows] for site in self.sites]), self.scale * scale
        )
        first = self.sites[0].source.start
        for site in self.sites:
            if site.layer is layer:
                weight[site.rows] = made[site.source.start - first : site.source.stop - first]


class Rescaled:
    """DoRA by output, beside the layer: g (W x + s B A x) + b with g = magnitude / |W + s B A|, row by row of W. The
    norm of any s is that of three numbers for each row, which are made when they are first needed.
    """

    def __init__(self, change: LowRank, magnitude: Tensor, rows: slice, dtype: torch.dtype) -> None:
        self.down, self.up = change.down.to(dtype), change.up.to(dtype)
        self.exact, self.magnitude, self.rows = change, magnitude, rows
        self._products: Tensor | None = None

    def factors(self, layer: VariantLinear, scale: float) -> Tensor:
        """g, float32 [rows]."""
        if self._products is None:
            weight, _ = layer.base.full_precision()
            self._products = self._measure(weight[self.rows])
        own, both, change = self._products
        norm = (own + 2 * scale * both + scale * scale * change).clamp_min(0).sqrt()
        return torch.where(norm > 0, self.magnitude / norm, 1.0)

    def _measure(self, weight: Tensor) -> Tensor:
        """|W|^2, <W, BA> and |BA|^2 by row, float32 [3, rows]."""
        down, up = self.exact.down.float(), self.exact.up.float()
        return torch.stack(
            [weight.square().sum(1), (up * (weight @ down.T)).sum(1), (up * (up @ (down @ down.T))).sum(1)]
        )

    def apply(self, layer: VariantLinear, x: Tensor, y: Tensor, scale: float) -> None:
        """Rescales y [T, out], the layer's output for x [T, in]."""
        part, bias = y[:, self.rows], layer.bias
        low = F.linear(F.linear(x, self.down), self.up)
        plain = part if bias is None else part - bias[self.rows]
        out = torch.add(plain, low, alpha=scale) * self.factors(layer, scale).to(y.dtype)
        part.copy_(out if bias is None else out + bias[self.rows])


class VariantLinear(AnyLinear):
    """Around a layer: rows of requests with adapters that make a new weight of it go through that weight. `pieces` has
    what each adapter makes of it, by Lora.key; `beside` those that need no copy. With `apart`, rows are computed one by
    one.
    """

    def __init__(
        self, base: AnyLinear, component: str, cache: MergedCache, *, dtype: torch.dtype, apart: bool = False
    ) -> None:
        super().__init__()
        self.base, self.component, self.cache, self.dtype, self.apart = base, component, cache, dtype, apart
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.pieces: dict[str, list[Piece]] = {}
        self.beside: dict[str, list[Rescaled]] = {}
        self.number = cache.new_number()
        self._bias: Tensor | None = None

    @property
    def variant(self) -> Callable[[Owner], object]:
        return self.cache.variant

    @property
    def weight(self) -> Tensor:
        """The weight of the layer inside: models ask their layers for dtype and device."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """That of the layer inside, [out] in the dtype of the copies."""
        if self._bias is None and "bias" in self.base.shapes():
            _, bias = self.base.full_precision()
            self._bias = None if bias is None else bias.to(self.dtype)
        return self._bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        runs = list(self._runs())
        if not any(chain for _, _, chain in runs):
            out: Tensor = self.base(x)
            return out
        parts = []
        for copied, group in itertools.groupby(runs, key=lambda run: self._is_copied(run[2]) and run[2]):
            mine = list(group)
            tokens = slice(mine[0][1].start, mine[-1][1].stop)
            if copied:
                weight = self._copy(copied, mine)
                of = [run[1] for run in mine] if self.apart else [tokens]
                parts += [product(x[each], weight, self.bias) for each in of]
            else:
                parts.append(self._through_base(x[tokens], [run[0] for run in mine]))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        for (chain, _), same in itertools.groupby(runs, key=lambda run: (run[2], self.apart and run[0])):
            mine = list(same)
            if chain and not self._is_copied(chain):
                key, scale = chain[0]
                tokens = slice(mine[0][1].start, mine[-1][1].stop)
                for part, piece in zip(self.beside[key], self.pieces[key], strict=True):
                    part.apply(self, x[tokens], y[tokens], piece.scale * scale)
        return y

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh) of `self(x)`, [T, in] -> [T, out]: that of the layer inside where no row has such adapters."""
        if any(chain for _, _, chain in self._runs()):
            return gelu_tanh(self(x))
        return self.base.gelu(x)

    def _runs(self) -> Iterator[tuple[int, slice, Chain]]:
        """The number of each row, its tokens and its adapters. A batch of one row gets all tokens, however many."""
        rows = active.get()
        if len(rows) == 1:
            yield 0, slice(None), self._chain(rows.owners[0])
            return
        stream = rows.stream(self.stream)
        for number, owner in enumerate(rows.owners):
            yield number, stream.slice(number), self._chain(owner)

    def _chain(self, owner: Owner) -> Chain:
        return tuple(
            (lora.key, lora.scale)
            for lora in owner_loras(owner)
            if lora.scale and lora.target in ("", self.component) and lora.key in self.pieces
        )

    def _is_copied(self, chain: Chain) -> bool:
        return len(chain) > 1 or any(key not in self.beside for key, _ in chain)

    def _through_base(self, x: Tensor, numbers: Sequence[int]) -> Tensor:
        """x [T, in], the tokens of these adjacent rows -> [T, out]."""
        rows = active.get()
        if len(numbers) < len(rows):
            some = slice(numbers[0], numbers[-1] + 1)
            rows = Rows(rows.owners[some], rows.layout.rows[some], rows.layouts)
        with activate(rows):
            out: Tensor = self.base(x)
        return out

    def _copy(self, chain: Chain, runs: Sequence[tuple[int, slice, Chain]]) -> Tensor:
        """The weight [out, in] of a chain, for rows of `runs`."""
        users = [active.get().owners[number][0] for number, _, _ in runs]
        return self.cache.get((self.number, chain), users, lambda: self.merged_weight(chain).to(self.dtype))

    def merged_weight(self, chain: Chain) -> Tensor:
        """The weight with the adapters of a chain merged into it, one after the other: a new float32 [out, in]."""
        weight, _ = self.base.full_precision()
        for place, (key, scale) in enumerate(chain):
            for piece in self.pieces.get(key, ()):
                piece.merge(self, weight, chain[:place], scale)
        return weight

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """Those of the layer inside, float32 [out, in] and [out]."""
        return self.base.full_precision()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Passes weight [out, in] or bias [out] on to the wrapped layer."""
        self.base.load_tensor(name, tensor)


def add(
    module: nn.Module,
    key: str,
    change: Change,
    by_layer: Mapping[str, Sequence[Part]],
    context: Context,
    cache: MergedCache,
) -> None:
    """Adds an adapter's change that makes new weights, for rows of the layers at these paths.

    Raises ConfigError for the setting `lora` where a layer does not have its whole weight here.
    """
    delta = change.delta
    assert isinstance(delta, Whole)
    weights = context.spec.weights[context.component]
    sites = []
    for path, parts in by_layer.items():
        precise = weights.in_float32(f"{path}.weight")
        dtype = torch.float32 if precise else context.dtype
        layer = _wrap_layer(module, path, key, change, dtype, context, cache)
        sites += [Site(layer, part.rows, part.source) for part in parts]
    sites.sort(key=lambda site: site.source.start)
    if not delta.by_rows:
        for layer in dict.fromkeys(site.layer for site in sites):
            _add(layer, key, Piece(_moved(delta, context.device, layer.dtype), change.scale, tuple(sites)))
        return
    for site in sites:
        moved = _moved(delta.rows(site.source), context.device, site.layer.dtype)
        _add(site.layer, key, Piece(moved, change.scale, (site,)))


def _add(layer: VariantLinear, key: str, piece: Piece) -> None:
    pieces, transform = layer.pieces.setdefault(key, []), piece.transform
    others = layer.beside.pop(key, [])
    if isinstance(transform, Dora) and transform.by_output and isinstance(transform.change, LowRank):
        others.append(Rescaled(transform.change, transform.magnitude, piece.sites[0].rows, layer.dtype))
    pieces.append(piece)
    if len(others) == len(pieces):
        layer.beside[key] = others


def own_weights(module: nn.Module, key: str, component: str) -> tuple[dict[str, int], dict[str, int]]:
    """The layers of which an adapter makes new weights, with the bytes of a copy: those that it needs one of, and those
    that it needs none of unless another such adapter is asked for with it.
    """
    copied: dict[str, int] = {}
    rescaled: dict[str, int] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, VariantLinear) and key in layer.pieces:
            size = layer.in_features * layer.out_features * layer.dtype.itemsize
            (rescaled if key in layer.beside else copied)[f"{component}.{path}"] = size
    return copied, rescaled


def remove(module: nn.Module, key: str, cache: MergedCache) -> None:
    """Removes an adapter from all layers. No row with it may be running."""
    for layer in module.modules():
        if isinstance(layer, VariantLinear):
            layer.pieces.pop(key, None)
            layer.beside.pop(key, None)
    cache.drop(lambda kept: any(name == key for name, _ in kept[1]))


def _wrap_layer(
    module: nn.Module,
    path: str,
    key: str,
    change: Change,
    dtype: torch.dtype,
    context: Context,
    cache: MergedCache,
) -> VariantLinear:
    """The wrapper of a layer, inside of what adds to it; the layer is wrapped if it was not before."""
    layer = module.get_submodule(path)
    outer = layer if isinstance(layer, LoraLinear) else None
    inner = layer if outer is None else outer.base
    assert isinstance(inner, AnyLinear)
    if isinstance(inner, VariantLinear):
        return inner
    part = _without_weight(inner)
    if part is not None:
        raise refused(
            key,
            f"{change.layer} is {change.kind}, which makes a new weight of the layer, and a {type(part).__name__} has "
            f"only a part of it; spread tokens over ranks and not weights, or {INSTEAD}",
        )
    variant = VariantLinear(inner, context.component, cache, dtype=dtype, apart=context.batch_invariant)
    if outer is not None:
        outer.base = variant
    else:
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, variant)
    return variant


def _without_weight(layer: AnyLinear) -> AnyLinear | None:
    """What of a layer and the layers inside of it cannot tell its weight. One of another rank is never asked."""
    for part in layer.modules():
        if not isinstance(part, AnyLinear) or isinstance(part, Elsewhere):
            continue
        if type(part).full_precision is AnyLinear.full_precision:
            return part
    return None


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A change with its tensors on a device: matrices in a dtype, vectors and rotations in float32, and orders of
    channels.
    """
    if isinstance(value, Tensor):
        kept = dtype if value.dim() == 2 else torch.float32
        return value.to(device, kept) if value.is_floating_point() else value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(each, device, dtype) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _moved(getattr(value, name), device, dtype) for name in names})
    return value
