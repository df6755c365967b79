"""Changes that make a new weight of a layer's. Rows of requests with such adapters go through a copy of the weight with
the changes merged into it; the others go through the layer itself, in the same forward.

Copies are merged in float32 from the weight that the layer computes with, as numbers where it is codes, and kept in the
model's dtype: a change that is small beside a step of 8 bits would be rounded away if it became codes again.

DoRA by output needs no copy: its outputs are those of the layer and of two factors, times a number for each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.features.lora.layer import owner_loras
from omni_grpc.features.lora.variants import Chain, MergedCache
from omni_grpc.loading.adapters.binding import Part
from omni_grpc.loading.adapters.deltas import LowRank, Whole, is_rescaling
from omni_grpc.loading.adapters.transforms import Dora, Transform
from omni_grpc.nn.linear import AnyLinear, Elsewhere, activate, active
from omni_grpc.nn.rows import Owner, Rows
from omni_grpc.nn.updates import mapped
from omni_grpc.ops.linear import linear as product
from omni_grpc.ops.quant import gelu_tanh

INSTEAD = "fold it into the checkpoint with omni-grpc lora merge"


@dataclasses.dataclass(frozen=True, slots=True)
class WholeUpdate:
    """What an adapter makes of some rows of a layer, times the scale of its file. `sites` are all the rows that it has
    to see, in the order of the change, also those of other layers, whose `module` is their path.
    """

    transform: Transform
    scale: float
    sites: tuple[Part, ...]

    @property
    def beside(self) -> bool:
        """Whether a layer can have it without a copy of its weight."""
        return is_rescaling(self.transform)


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Rows of a layer's weight, and which rows of the change they are."""

    layer: VariantLinear
    rows: slice
    source: slice


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A WholeUpdate with its layers."""

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

    def __init__(self, piece: Piece, dtype: torch.dtype) -> None:
        dora, (site,) = piece.transform, piece.sites
        assert isinstance(dora, Dora)
        assert isinstance(dora.change, LowRank)
        self.down, self.up = dora.change.down.to(dtype), dora.change.up.to(dtype)
        self.magnitude, self.rows = dora.magnitude, site.rows
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
        down, up = self.down.float(), self.up.float()
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
        self,
        base: AnyLinear,
        component: str,
        cache: MergedCache,
        *,
        dtype: torch.dtype,
        layer_of: Callable[[str], VariantLinear],
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.base, self.component, self.cache, self.dtype, self.apart = base, component, cache, dtype, apart
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.pieces: dict[str, list[Piece]] = {}
        self.beside: dict[str, list[Rescaled]] = {}
        self.number = cache.new_number()
        self._layer_of, self._linked = layer_of, False
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

    def put(self, key: str, updates: Sequence[WholeUpdate]) -> None:
        """Takes an adapter's changes of the layer, on its device. What had this key before is gone. From any thread:
        rows that run meanwhile have other adapters.
        """
        pieces = [
            Piece(
                update.transform,
                update.scale,
                tuple(Site(self._layer_of(site.module), site.rows, site.source) for site in update.sites),
            )
            for update in updates
        ]
        if all(update.beside for update in updates):
            self.beside[key] = [Rescaled(piece, self.dtype) for piece in pieces]
        self.pieces[key] = pieces
        self._note_links()

    def remove(self, key: str) -> None:
        """Drops an adapter, if the layer has it, and all that was merged with it. From any thread, as `put`."""
        self.pieces.pop(key, None)
        self.beside.pop(key, None)
        self._note_links()
        self.cache.drop(lambda kept: kept[0] == self.number and any(name == key for name, _ in kept[1]))

    def _note_links(self) -> None:
        sites = [site for each in list(self.pieces.values()) for piece in each for site in piece.sites]
        self._linked = any(site.layer is not self for site in sites)

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
        rows = active.get()
        if not any(chain for _, _, chain in self._runs()):
            return self.base.gelu(x)
        if self.apart and len(rows) > 1:
            # the GELU of the layer inside may differ in the last bit, so a row has to get what it would get alone
            outputs = []
            for number, tokens, _ in self._runs():
                with activate(_some(rows, number, number + 1)):
                    outputs.append(self.gelu(x[tokens]))
            return torch.cat(outputs)
        return gelu_tanh(self(x))

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
        """The adapters of a row that change this layer, or what one that does so has to see of others."""
        loras = [lora for lora in owner_loras(owner) if lora.scale and lora.target in ("", self.component)]
        if not any(lora.key in self.pieces for lora in loras):
            return ()
        layers = self._sees() if self._linked else {self}
        return tuple((lora.key, lora.scale) for lora in loras if any(lora.key in layer.pieces for layer in layers))

    def _sees(self) -> set[VariantLinear]:
        """This layer, and those whose weights adapters look at for it."""
        found, coming = {self}, [self]
        while coming:
            pieces = [piece for each in coming.pop().pieces.values() for piece in each]
            new = {site.layer for piece in pieces for site in piece.sites} - found
            found |= new
            coming += new
        return found

    def _is_copied(self, chain: Chain) -> bool:
        return len(chain) > 1 or any(key not in self.beside for key, _ in chain)

    def _through_base(self, x: Tensor, numbers: Sequence[int]) -> Tensor:
        """x [T, in], the tokens of these adjacent rows -> [T, out]."""
        rows = active.get()
        with activate(rows if len(numbers) == len(rows) else _some(rows, numbers[0], numbers[-1] + 1)):
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


def _some(rows: Rows, first: int, end: int) -> Rows:
    """Some adjacent rows, with nothing bound to them."""
    return Rows(rows.owners[first:end], rows.layout.rows[first:end], rows.layouts)


def fault(layer: nn.Module, kind: str) -> str:
    """Why a layer cannot have weights of its own for some rows, "" if it can."""
    assert isinstance(layer, AnyLinear)
    part = _without_weight(layer)
    if part is None:
        return ""
    return (
        f"{kind} makes a new weight of the layer, of which a {type(part).__name__} does not have the whole; spread "
        f"tokens over ranks in place of weights, or {INSTEAD}"
    )


def placed(
    delta: Whole,
    scale: float,
    by_layer: Mapping[str, Sequence[Part]],
    dtype: torch.dtype,
    convert: Callable[[Tensor, torch.dtype], Tensor],
) -> Iterator[tuple[str, WholeUpdate]]:
    """A change that makes new weights, for rows of the layers at these paths. Its matrices are kept in `dtype`, vectors
    and rotations in float32.
    """

    def kept(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return convert(tensor, dtype if tensor.dim() == 2 else torch.float32)

    sites = [Part(path, part.rows, part.source) for path, parts in by_layer.items() for part in parts]
    sites.sort(key=lambda site: site.source.start)
    if delta.by_rows:
        for site in sites:
            yield site.module, WholeUpdate(mapped(delta.rows(site.source), kept), scale, (site,))
        return
    whole = mapped(delta, kept)
    yield from ((path, WholeUpdate(whole, scale, tuple(sites))) for path in by_layer)


def _without_weight(layer: AnyLinear) -> AnyLinear | None:
    """What of a layer and the layers inside of it cannot tell its weight. One of another rank is never asked."""
    for part in layer.modules():
        if not isinstance(part, AnyLinear) or isinstance(part, Elsewhere):
            continue
        if type(part).full_precision is AnyLinear.full_precision:
            return part
    return None
