"""From the files of adapters to the layers that they change."""

from __future__ import annotations

import functools
import itertools
import logging
from pathlib import Path

from torch import nn

from omni_grpc.config import LoraConfig
from omni_grpc.features import Context, Effects
from omni_grpc.features.lora.layer import LoraLinear
from omni_grpc.loading.adapters import AdapterFile, read_adapter
from omni_grpc.loading.adapters.binding import OTHER, Bound, Change, Layers, Part, bind
from omni_grpc.loading.adapters.deltas import LowRank
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.lora import Adapter

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
