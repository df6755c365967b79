"""What an adapter changes of one denoiser, and why the rest of it changes nothing."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from omni_grpc.loading.adapters.deltas import TABLE, Bias, Delta, Scaled, Vector, deltas, vectors
from omni_grpc.loading.adapters.encoder_names import EncoderNames, is_encoder
from omni_grpc.loading.adapters.files import AdapterFile, for_layer, refused
from omni_grpc.loading.adapters.keys import Entry
from omni_grpc.loading.adapters.names import TEXT_ENCODER, Named, Names, plain
from omni_grpc.loading.adapters.parts import Malformed, NotServed
from omni_grpc.types.spec import FileLayout, RowSlice

OTHER, ZERO, UNKNOWN, NOT_LINEAR, COPY, NO_ADAPTER = (
    "other component",
    "zero",
    "no such layer in the model",
    "not a linear layer of the model",
    "a copy of what the file has for the parts of this layer",
    "no part of an adapter that is known",
)
"""Why a key changes nothing."""

FACTORED = ("LoRA", "LoHa", "LoKr")
"""Kinds that tools make for any module with a matrix: also for those that a model looks up or convolves."""

Layers = Mapping[str, tuple[int, ...] | None]
"""The modules of a denoiser that have a weight, by the checkpoint's names: [out, in] of a linear layer, [channels] of a
norm, None of any other. Tables of modulation are here as well, by their own names and with their shapes.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Rows of a module's weight, and the rows of the change that are added to them."""

    module: str
    rows: slice
    source: slice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an adapter adds to some rows of some modules of `component`: `delta` times `scale`. It came from the file's
    `keys`, which call it `layer`.
    """

    component: str
    layer: str
    kind: str
    parts: tuple[Part, ...]
    delta: Delta
    scale: float
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """An adapter beside one denoiser: its changes, why other keys make none, and by layer why those that would change
    it cannot be applied.
    """

    changes: tuple[Change, ...]
    skipped: Mapping[str, str]
    refusals: Mapping[str, str]

    @property
    def keys(self) -> frozenset[str]:
        """Those that make a change."""
        return frozenset(key for change in self.changes for key in change.keys)

    def check(self, name: str) -> None:
        """Raises ConfigError for the setting `lora`, of the adapter `name`, where something cannot be applied."""
        if self.refusals:
            first, *others = self.refusals.values()
            more = f", and {len(others)} layers more" if len(others) > 1 else ", and a layer more" if others else ""
            raise refused(name, first + more)


def bind(
    name: str,
    file: AdapterFile,
    component: str,
    layers: Layers,
    *,
    layouts: Sequence[FileLayout] = (),
    components: Sequence[str] = (),
) -> Bound:
    """What the adapter `name` changes of `component`, a denoiser or a text encoder, which has these layers; `layouts`
    are the other names that they have in files, `components` all denoisers of the model.

    Refused are keys that would change the component and cannot be applied: of a kind that is not served, of other
    shapes than the layer, or of what is no such change. Keys of zeros change nothing. Raises ConfigError for the
    setting `lora` where the file has a layer twice, or a config that does not say what it means for it.
    """
    table = EncoderNames(component, layers) if is_encoder(component) else Names(layers, layouts, components)
    skipped = dict.fromkeys(file.others, NO_ADAPTER)
    found: dict[str, tuple[Entry, Named]] = {}
    for entry in file.entries.values():
        named = _named(table, entry)
        if named.component == TEXT_ENCODER:
            skipped |= dict.fromkeys(entry.keys.values(), TEXT_ENCODER)
        elif named.component not in ("", component):
            skipped |= dict.fromkeys(entry.keys.values(), OTHER)
        elif named.modules is None:
            zero = entry.kind == "diff_m" and _changes_nothing(entry)
            skipped |= dict.fromkeys(entry.keys.values(), ZERO if zero else UNKNOWN)
        else:
            found[entry.layer] = entry, named
    _drop_copies(name, found, skipped)
    changes: list[Change] = []
    refusals: dict[str, str] = {}
    for entry, named in found.values():
        if _changes_nothing(entry):
            skipped |= dict.fromkeys(entry.keys.values(), ZERO)
            continue
        if entry.kind in FACTORED and any(not _is_linear(layers[part.module]) for part in named.modules or ()):
            skipped |= dict.fromkeys(entry.keys.values(), NOT_LINEAR)
            continue
        try:
            made = list(_changes(file, component, entry, named.modules or (), layers))
        except NotServed as error:
            refusals[entry.layer] = f"{entry.layer} of {file.path.name} is not served yet: {error}"
            continue
        except Malformed as error:
            refusals[entry.layer] = str(error)
            continue
        left = set(entry.keys.values())
        for change in made:
            if not change.delta.is_zero:
                changes.append(change)
                left -= set(change.keys)
        skipped |= dict.fromkeys(sorted(left), ZERO if made else NO_ADAPTER)
    return Bound(tuple(changes), skipped, refusals)


def _named(table: Names | EncoderNames, entry: Entry) -> Named:
    """What an entry changes. One of modulation (`diff_m`) has the name of a block, or of the head, whose table it is
    of.
    """
    found = table.find(entry.layer)
    if entry.kind != "diff_m" or found.component == TEXT_ENCODER:
        return found
    tables = [table.find(f"{entry.layer}.{TABLE}"), table.find(re.sub(r"(^|\.)head$", rf"\1{TABLE}", entry.layer))]
    return next((named for named in tables if named.modules is not None), dataclasses.replace(found, modules=None))


def _is_linear(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) == 2


def _changes_nothing(entry: Entry) -> bool:
    """Whether a change of any kind is zero, also of those that are not served."""
    if entry.kind in ("DoRA", "set_weight", "widening") or {"rescale", "boft_s"} & entry.keys.keys():
        # which replace or multiply something, so that zeros do too
        return False
    parts = [tensor for part, tensor in entry.tensors.items() if part not in ("alpha", "scalar")]
    return bool(parts) and all(tensor.numel() and not tensor.any() for tensor in parts)


def _drop_copies(name: str, found: dict[str, tuple[Entry, Named]], skipped: dict[str, str]) -> None:
    """Drops what the file has of several layers as one where it has them one by one as well. Raises ConfigError for a
    layer that it has twice.
    """
    owners: dict[tuple[str, str], str] = {}
    for layer, (entry, named) in found.items():
        if named.modules and len(named.modules) == 1:
            other = owners.setdefault((named.modules[0].module, entry.kind), layer)
            if other != layer:
                raise refused(name, f"{other} and {layer} are the same layer; leave one of them out of the file")
    for layer, (entry, named) in list(found.items()):
        parts = {part.module for part in named.modules or ()}
        if len(parts) > 1 and any((part, entry.kind) in owners for part in parts):
            skipped |= dict.fromkeys(entry.keys.values(), COPY)
            del found[layer]


def _changes(
    file: AdapterFile, component: str, entry: Entry, modules: Sequence[RowSlice], layers: Layers
) -> Iterator[Change]:
    first = modules[0].module if modules else entry.layer
    shapes = {part.module: layers[part.module] for part in modules}
    if all(shape is not None and len(shape) != 2 for shape in shapes.values()):
        yield from _vector_changes(component, entry, first, layers)
        return
    sizes = {module: (shape[0], shape[1]) for module, shape in shapes.items() if shape is not None and len(shape) == 2}
    if len(sizes) < len(shapes):
        raise NotServed(f"{first} is neither a linear layer nor a norm; use a file without it")
    own = for_layer(file, plain(entry.layer))
    wanted = sum(outputs for outputs, _ in sizes.values()), next(iter(sizes.values()))[1]
    for scaled in deltas(entry, own, (plain(entry.layer), *sizes), wanted):
        rows, *inputs = scaled.delta.shape
        wrong = rows != wanted[0] or (inputs and inputs[0] != wanted[1])
        if wrong or rows % sum(part.size for part in modules):
            expected = wanted if inputs else wanted[:1]
            raise Malformed(f"{first} changes a weight {(rows, *inputs)}, the model's is {expected}")
        kind = "bias" if isinstance(scaled.delta, Bias) else entry.kind
        yield _change(component, entry, kind, scaled, tuple(_parts(modules, rows, sizes)))


def _vector_changes(component: str, entry: Entry, module: str, layers: Layers) -> Iterator[Change]:
    """What an entry makes of the norm or the table `module`."""
    shape = layers[module] or ()
    for scaled in vectors(entry, TABLE if module.endswith(TABLE) else "weight"):
        assert isinstance(scaled.delta, Vector)
        if scaled.delta.values.numel() != math.prod(shape) or scaled.delta.shape[-1:] != shape[-1:]:
            raise Malformed(f"{module} changes {scaled.delta.shape}, the model's is {shape}")
        values = scaled.delta.values.reshape(shape)
        delta = dataclasses.replace(scaled.delta, values=values)
        every = slice(0, shape[0])
        yield _change(
            component, entry, entry.kind, dataclasses.replace(scaled, delta=delta), (Part(module, every, every),)
        )


def _change(component: str, entry: Entry, kind: str, scaled: Scaled, parts: tuple[Part, ...]) -> Change:
    return Change(
        component=component,
        layer=entry.layer,
        kind=kind,
        parts=parts,
        delta=scaled.delta,
        scale=scaled.scale,
        keys=scaled.keys,
    )


def _parts(modules: Sequence[RowSlice], rows: int, sizes: Mapping[str, tuple[int, int]]) -> Iterator[Part]:
    """Where the rows of a change go: each module's one after the other, within a module by their place."""
    unit, at = rows // sum(part.size for part in modules), 0
    for number, part in enumerate(modules):
        size = part.size * unit
        before = sum(
            other.size * unit
            for index, other in enumerate(modules)
            if other.module == part.module and (other.place, index) < (part.place, number)
        )
        if before + size > sizes[part.module][0]:
            raise Malformed(f"{part.module} changes {before + size} rows, the model's has {sizes[part.module][0]}")
        yield Part(part.module, slice(before, before + size), slice(at, at + size))
        at += size
