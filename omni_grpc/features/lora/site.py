"""One component of a model, and what the file of an adapter is to its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.features.lora import gains, merged
from omni_grpc.features.lora.gains import Gains, VectorUpdate
from omni_grpc.features.lora.layer import LoraLinear
from omni_grpc.features.lora.merged import VariantLinear, WholeUpdate
from omni_grpc.features.lora.variants import MergedCache
from omni_grpc.loading.adapters import AdapterFile
from omni_grpc.loading.adapters.binding import Bound, Change, Layers, Part
from omni_grpc.loading.adapters.deltas import Bias, Dense, Kron, LowRank, Vector, Whole
from omni_grpc.loading.adapters.targets import bind_targets
from omni_grpc.nn.linear import AnyLinear, Elsewhere, Shard
from omni_grpc.nn.updates import BiasUpdate, DenseUpdate, KronUpdate, LowRankUpdate, Update, columns, mapped
from omni_grpc.types.errors import InternalError
from omni_grpc.types.spec import WeightMap


class Target(NamedTuple):
    """What takes changes: the path of a module, and which of the things around it or in it they are for."""

    path: str
    kind: str


ADDED, MERGED, VECTORS = "added", "merged", "vectors"
"""What is added to outputs, what makes new weights, and what changes parameters that are no matrices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A change of a layer, by what takes it."""

    target: Target
    update: Update | WholeUpdate | VectorUpdate


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A component of a model that adapters change."""

    module: nn.Module
    context: Context
    copies: MergedCache

    @property
    def component(self) -> str:
        return self.context.component

    def bind(self, name: str, file: AdapterFile) -> Bound:
        """What the adapter `name` changes of the component. Raises ConfigError for what cannot be applied."""
        bound = bind_targets(
            name,
            file,
            self.component,
            self._layers(),
            layouts=self.context.spec.layouts,
            components=tuple(self.context.spec.weights),
            denoisers=self.context.denoisers,
        )
        faults = {change.layer: why for change in bound.changes if (why := self._fault(change))}
        told = {layer: f"{layer} of {file.name} is not served here: {why}" for layer, why in faults.items()}
        bound = dataclasses.replace(bound, refusals={**bound.refusals, **told})
        bound.check(name)
        return bound

    def _fault(self, change: Change) -> str:
        """Why the component cannot have a change, "" if it can."""
        if isinstance(change.delta, Vector):
            return gains.fault(self.module, change.delta, change.parts[0].module, self.context)
        if isinstance(change.delta, Whole):
            layers = [self.module.get_submodule(self.context.places[part.module].path) for part in change.parts]
            return next((why for layer in layers if (why := merged.fault(layer, change.kind))), "")
        return ""

    def placed(self, bound: Bound) -> list[Placed]:
        """The changes layer by layer, or this rank's part of them: the rows that make its outputs, the columns that
        read its inputs. In host memory, in the precision that the layers compute in.
        """
        weights = self.context.spec.weights[self.component]
        converted: dict[tuple[int, torch.dtype], Tensor] = {}
        # what several parts share is kept once, and lives as long as its number counts
        kept: list[Tensor] = []

        def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            if (id(tensor), dtype) not in converted:
                kept.append(tensor)
                converted[id(tensor), dtype] = tensor.to("cpu", dtype)
            return converted[id(tensor), dtype]

        found = []
        for change in bound.changes:
            if isinstance(change.delta, Vector):
                where, vector = gains.placed(change.delta, change, self.context)
                found.append(Placed(Target(where, VECTORS), vector))
                continue
            # of a delta that all of its parts share
            precise = any(weights.in_float32(f"{self.context.places[one.module].path}.weight") for one in change.parts)
            dtype = torch.float32 if precise else self.context.dtype
            by_layer = self._by_layer(change)
            if isinstance(change.delta, Whole):
                by_layer = {path: parts for path, parts in by_layer.items() if not self._is_elsewhere(path)}
                wholes = merged.placed(change.delta, change.scale, by_layer, dtype, convert)
                found += [Placed(Target(path, MERGED), whole) for path, whole in wholes]
                continue
            for where, parts in by_layer.items():
                path, _, shard = self._layer(where)
                if self._is_elsewhere(path):
                    continue
                for update in _updates(change, parts, shard):
                    made = mapped(update, lambda x, dtype=dtype: convert(x, dtype))  # type: ignore[misc]
                    found.append(Placed(Target(path, ADDED), made))
        return found

    def own_weights(self, placed: Sequence[Placed]) -> tuple[dict[str, int], dict[str, int]]:
        """The layers of which an adapter makes new weights, with the bytes of a copy: those that it needs one of, and
        those that it needs none of by itself. See types.lora.Adapter.
        """
        wholes: dict[str, list[WholeUpdate]] = {}
        for one in placed:
            if isinstance(one.update, WholeUpdate):
                wholes.setdefault(one.target.path, []).append(one.update)
        copied: dict[str, int] = {}
        rescaled: dict[str, int] = {}
        for path, updates in wholes.items():
            layer = self.module.get_submodule(path)
            assert isinstance(layer, AnyLinear)
            size = layer.in_features * layer.out_features * self._dtype(path).itemsize
            (rescaled if all(update.beside for update in updates) else copied)[f"{self.component}.{path}"] = size
        return copied, rescaled

    def _is_elsewhere(self, path: str) -> bool:
        """Whether another rank has the layer."""
        layer = self.module.get_submodule(path)
        while isinstance(layer, LoraLinear | VariantLinear):
            layer = layer.base
        return isinstance(layer, Elsewhere)

    def _dtype(self, path: str) -> torch.dtype:
        """Of the weight of a layer, where it is kept in full precision."""
        weights = self.context.spec.weights.get(self.component, WeightMap())
        return torch.float32 if weights.in_float32(f"{path}.weight") else self.context.dtype

    def wrap(self, target: Target) -> LoraLinear | VariantLinear | Gains:
        """What takes changes for a target; it is put there if it is not yet."""
        if target.kind == VECTORS:
            return gains.holder(self.module, target.path, self.component)
        if target.kind == MERGED:
            return self._variant(target.path)
        path, linear = target.path, self.module.get_submodule(target.path)
        if isinstance(linear, LoraLinear):
            return linear
        assert isinstance(linear, AnyLinear)
        owner, _, leaf = path.rpartition(".")
        parent = self.module.get_submodule(owner)
        # of one that is spread over ranks, what is inside of the layer is wrapped: before the ranks sum
        shard = parent.shard if isinstance(parent, AnyLinear) else None
        wrapper = LoraLinear(linear, self.component, apart=self.context.batch_invariant, shard=shard)
        setattr(parent, leaf, wrapper)
        return wrapper

    def unwrap(self, target: Target) -> None:
        """Puts a layer back in the place of a wrapper."""
        wrapper = self.module.get_submodule(target.path)
        outer = wrapper if isinstance(wrapper, LoraLinear) else None
        if target.kind == ADDED and outer is not None:
            self._set(target.path, outer.base)
        inner = wrapper if outer is None else outer.base
        if target.kind == MERGED and isinstance(inner, VariantLinear):
            if outer is None:
                self._set(target.path, inner.base)
            else:
                outer.base = inner.base

    def _variant(self, path: str) -> VariantLinear:
        """The wrapper of a layer whose rows have weights of their own, inside of the one that adds to them."""
        layer = self.module.get_submodule(path)
        outer = layer if isinstance(layer, LoraLinear) else None
        inner = layer if outer is None else outer.base
        if isinstance(inner, VariantLinear):
            return inner
        assert isinstance(inner, AnyLinear)
        wrapper = VariantLinear(
            inner,
            self.component,
            self.copies,
            dtype=self._dtype(path),
            apart=self.context.batch_invariant,
            layer_of=self._variant,
        )
        if outer is None:
            self._set(path, wrapper)
        else:
            outer.base = wrapper
        return wrapper

    def _set(self, path: str, module: nn.Module) -> None:
        owner, _, leaf = path.rpartition(".")
        setattr(self.module.get_submodule(owner), leaf, module)

    def _layers(self) -> Layers:
        """The modules of the checkpoint that have a weight, and its tables of modulation."""
        layers: dict[str, tuple[int, ...] | None] = dict(gains.tables(self.module, self.context))
        for name, place in self.context.places.items():
            owner = self.module.get_submodule(place.path)
            layers[name] = None
            if isinstance(owner, AnyLinear):
                outputs, inputs = owner.shapes()["weight"]
                layers[name] = (outputs if place.rows is None else place.rows.stop - place.rows.start), inputs
            elif gains.is_norm(owner):
                layers[name] = gains.size(owner)
        return layers

    def _by_layer(self, change: Change) -> dict[str, list[Part]]:
        """Where a change goes by the paths of our layers, of which several modules of the checkpoint may be one. Parts
        that follow each other in the layer as they do in the change are one, unless they have no factor in common.
        """
        found: dict[str, list[Part]] = {}
        for part in change.parts:
            place = self.context.places[part.module]
            start = place.rows.start if place.rows is not None else 0
            rows = slice(start + part.rows.start, start + part.rows.stop)
            mine = found.setdefault(place.path, [])
            last = mine[-1] if mine else None
            follows = last and last.rows.stop == rows.start and last.source.stop == part.source.start
            if last and follows and not _apart(change, last.source, part.source):
                source = slice(last.source.start, part.source.stop)
                mine[-1] = Part(place.path, slice(last.rows.start, rows.stop), source)
            else:
                mine.append(Part(place.path, rows, part.source))
        return found

    def _layer(self, path: str) -> tuple[str, AnyLinear, Shard | None]:
        """Path and module of what is wrapped of a layer, and what it has of one that is spread over ranks."""
        linear = self.module.get_submodule(path)
        assert isinstance(linear, AnyLinear)
        within = next((name for name, child in linear.named_children() if isinstance(child, AnyLinear)), "")
        if linear.shard is None or not within:
            return path, linear, None
        inner = linear.get_submodule(within)
        assert isinstance(inner, AnyLinear)
        return f"{path}.{within}", inner, linear.shard


def _apart(change: Change, first: slice, second: slice) -> bool:
    """Whether two parts of a change use none of the same factors, as tools write them that trained each by itself."""
    if not isinstance(change.delta, LowRank):
        return False
    up = change.delta.up
    return not bool((up[first].any(0) & up[second].any(0)).any())


def _updates(change: Change, parts: Sequence[Part], shard: Shard | None) -> Iterator[Update]:
    for part in parts:
        for mine, theirs in _common(part.rows, None if shard is None else shard.outputs):
            source = slice(part.source.start + theirs.start, part.source.start + theirs.stop)
            if (update := _update(change, source, mine, shard)) is not None:
                yield update


def _update(change: Change, source: slice, rows: slice, shard: Shard | None) -> Update | None:
    """These rows of a change, for rows of the layer; None for what another rank adds. In float32, with the scale of the
    file.
    """
    inputs = None if shard is None else shard.inputs
    match change.delta:
        case LowRank(down, up):
            part = up[source]
            # the layers of a fused one may have factors of their own, side by side
            used = part.any(0)
            if used.any() and not used.all():
                down, part = down[used], part[:, used]
            return LowRankUpdate(columns(down, inputs), part * change.scale, rows)
        case Kron(first, second):
            return KronUpdate.cut(first * change.scale, second, source, rows, inputs)
        case Dense(weight):
            return DenseUpdate(columns(weight[source], inputs) * change.scale, rows)
        case Bias(vector):
            # once, where the ranks sum
            if shard is not None and inputs is not None and dist.get_rank(shard.group):
                return None
            return BiasUpdate(vector[source] * change.scale, rows)
        case _:
            raise InternalError(f"{change.kind} of {change.layer} is nothing that is added to outputs")


def _common(rows: slice, kept: Sequence[slice] | None) -> Iterator[tuple[slice, slice]]:
    """Of some rows of a weight, those that a rank has: where they are in its part, and which of `rows` they are."""
    if kept is None:
        yield rows, slice(0, rows.stop - rows.start)
        return
    at = 0
    for part in kept:
        start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
        if start < stop:
            shift = at - part.start
            yield slice(start + shift, stop + shift), slice(start - rows.start, stop - rows.start)
        at += part.stop - part.start
