"""LoRA (https://arxiv.org/abs/2106.09685) and its kin: y = W x + the sum of scale * change(x), adapters and scales per
row.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.config import LoraConfig
from omni_grpc.features import Context, Effects
from omni_grpc.loading.adapters import AdapterFile, read_adapter
from omni_grpc.loading.adapters.binding import OTHER, Bound, Change, Layers, Part, bind
from omni_grpc.loading.adapters.deltas import Bias, Dense, Kron, LowRank
from omni_grpc.nn.linear import AnyLinear, Shard, active
from omni_grpc.nn.rows import Owner
from omni_grpc.nn.updates import BiasUpdate, DenseUpdate, KronUpdate, LowRankUpdate, Update, columns, moved
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.lora import Adapter, Lora

logger = logging.getLogger(__name__)


def apply(module: nn.Module, config: LoraConfig, context: Context) -> None:
    """Wraps the linear layers that the adapters of the setting `lora` change. A request names the adapters that it
    wants.

    Raises ConfigError for an adapter that cannot be read, whose shapes do not fit, or that has changes of a kind that
    cannot be made row by row.
    """
    layers = _layers(module, context)
    for name, path in (config.lora or {}).items():
        file = read_adapter(name, Path(path))
        bound = bind(
            name,
            file,
            context.component,
            layers,
            layouts=context.spec.layouts,
            components=tuple(context.spec.weights),
        )
        bound.check(name)
        for change in bound.changes:
            for place, parts in _by_layer(change, context).items():
                _wrap_layer(module, place, context).add(name, change, parts, context)
        _report(name, file, bound, context)
    context.effects.checks["lora"] = functools.partial(_check_applied, context.effects)


def _layers(module: nn.Module, context: Context) -> Layers:
    """The modules of the checkpoint that have a weight."""
    layers: dict[str, tuple[int, int] | None] = {}
    for name, place in context.places.items():
        owner = module.get_submodule(place.path)
        layers[name] = None
        if isinstance(owner, AnyLinear):
            outputs, inputs = owner.shapes()["weight"]
            layers[name] = (outputs if place.rows is None else place.rows.stop - place.rows.start), inputs
    return layers


def _by_layer(change: Change, context: Context) -> dict[str, list[Part]]:
    """Where a change goes by the paths of our layers, of which several modules of the checkpoint may be one. Parts that
    follow each other in the layer as they do in the change are one, unless they have no factor in common.
    """
    found: dict[str, list[Part]] = {}
    for part in change.parts:
        place = context.places[part.module]
        start = place.rows.start if place.rows is not None else 0
        rows = slice(start + part.rows.start, start + part.rows.stop)
        mine = found.setdefault(place.path, [])
        last = mine[-1] if mine else None
        follows = last and last.rows.stop == rows.start and last.source.stop == part.source.start
        if last and follows and not _apart(change, last.source, part.source):
            mine[-1] = Part(place.path, slice(last.rows.start, rows.stop), slice(last.source.start, part.source.stop))
        else:
            mine.append(Part(place.path, rows, part.source))
    return found


def _apart(change: Change, first: slice, second: slice) -> bool:
    """Whether two parts of a change use none of the same factors, as tools write them that trained each by itself."""
    if not isinstance(change.delta, LowRank):
        return False
    up = change.delta.up
    return not bool((up[first].any(0) & up[second].any(0)).any())


def _wrap_layer(module: nn.Module, path: str, context: Context) -> LoraLinear:
    """The wrapper of a layer; the layer is wrapped if it was not before."""
    linear = module.get_submodule(path)
    assert isinstance(linear, AnyLinear)
    within = next((name for name, child in linear.named_children() if isinstance(child, AnyLinear)), "")
    if linear.shard is not None and within:
        # a rank changes what it has, before the ranks sum
        path, shard, linear = f"{path}.{within}", linear.shard, linear.get_submodule(within)
        assert isinstance(linear, AnyLinear)
    else:
        shard = None
    if isinstance(linear, LoraLinear):
        return linear
    owner, _, leaf = path.rpartition(".")
    wrapper = LoraLinear(linear, context.component, apart=context.batch_invariant, shard=shard)
    setattr(module.get_submodule(owner), leaf, wrapper)
    return wrapper


def _check_applied(effects: Effects) -> None:
    """Raises ConfigError for an adapter that fits no layer of any denoiser."""
    for adapter in effects.found.loras:
        if not adapter.keys_applied:
            first = ", ".join(f"{key} ({why})" for key, why in itertools.islice(adapter.skipped.items(), 4))
            message = f"--lora {adapter.id}: no key of {adapter.file} fits a layer of the model; it has {first}"
            raise ConfigError(message, reason="BAD_LORA", violations=(Violation("lora", message),))


def _report(name: str, file: AdapterFile, bound: Bound, context: Context) -> None:
    """Reports what an adapter did to one denoiser, together with what it did to those before."""
    loras = {adapter.id: adapter for adapter in context.effects.found.loras}
    before, used = loras.get(name), bound.keys
    # what is another component's for one denoiser has a better reason elsewhere, or none
    skipped = {
        key: before.skipped[key] if before is not None and why == OTHER else why
        for key, why in bound.skipped.items()
        if before is None or key in before.skipped
    }
    logger.info("adapter %s: %d keys fit %s, %d fit nothing so far", name, len(used), context.component, len(skipped))
    loras[name] = Adapter(
        id=name,
        file=file.path.name,
        sha256=file.sha256,
        format=file.format,
        rank=file.rank,
        size_bytes=file.size_bytes,
        applied={**(before.applied if before else {}), context.component: len(used)},
        skipped=skipped,
    )
    context.effects.report(loras=tuple(loras.values()))


class LoraLinear(AnyLinear):
    """Adds to each row the change of its request's adapters. `parts` holds the adapters of the layer, by name. With
    `apart`, rows are computed one by one even where they have the same adapters.
    """

    def __init__(self, base: AnyLinear, component: str, *, apart: bool = False, shard: Shard | None = None) -> None:
        super().__init__()
        self.shard = shard
        self.base, self.component, self.apart = base, component, apart
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.parts: dict[str, list[Update]] = {}

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return _loras

    @property
    def weight(self) -> Tensor:
        """The weight of the layer inside: models ask their layers for dtype and device."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    def add(self, name: str, change: Change, parts: Sequence[Part], context: Context) -> None:
        """Adds an adapter's change of the layer, or this rank's part of it: the rows that make its outputs, the columns
        that read its inputs.
        """
        weights = context.spec.weights[context.component]
        precise = any(weights.in_float32(f"{context.places[part.module].path}.weight") for part in change.parts)
        dtype = torch.float32 if precise else context.dtype
        updates = self.parts.setdefault(name, [])
        for part in parts:
            for mine, theirs in _common(part.rows, None if self.shard is None else self.shard.outputs):
                source = slice(part.source.start + theirs.start, part.source.start + theirs.stop)
                if (update := self._update(change, source, mine)) is not None:
                    updates.append(moved(update, context.device, dtype))

    def _update(self, change: Change, source: slice, rows: slice) -> Update | None:
        """These rows of a change, for rows of this layer; None for what another rank adds. In float32, with the scale
        of the file.
        """
        inputs = None if self.shard is None else self.shard.inputs
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
                if self.shard is not None and inputs is not None and dist.get_rank(self.shard.group):
                    return None
                return BiasUpdate(vector[source] * change.scale, rows)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]: the wrapped layer, plus the changes of each row's adapters."""
        y: Tensor = self.base(x)
        for tokens, loras in self._adapter_runs():
            for lora in loras:
                if lora.scale and lora.target in ("", self.component):
                    for part in self.parts.get(lora.lora_id, ()):
                        y[tokens, part.rows].add_(part.change(x[tokens]), alpha=lora.scale)
        return y

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Passes weight [out, in] or bias [out] on to the wrapped layer."""
        self.base.load_tensor(name, tensor)

    def _adapter_runs(self) -> Iterator[tuple[slice, tuple[Lora, ...]]]:
        """Runs of adjacent rows with the same adapters, each as a slice of the layer's tokens. A batch of one row gets
        all tokens, however many: ahead of the steps, the tokens of "mod" are those of all steps.
        """
        rows = active.get()
        if len(rows) == 1:
            yield slice(None), _loras(rows.owners[0])
            return
        offsets = rows.stream(self.stream).offsets
        of = [_loras(owner) for owner in rows.owners]
        for (loras, _), run in itertools.groupby(range(len(rows)), key=lambda row: (of[row], self.apart and row)):
            numbers = list(run)
            yield slice(offsets[numbers[0]], offsets[numbers[-1] + 1]), loras


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


def _loras(owner: Owner) -> tuple[Lora, ...]:
    loras: tuple[Lora, ...] = owner[0].request.loras
    return loras
