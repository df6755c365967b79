"""From an adapter's file to what it changes of each component of a pipeline, and why the rest of it changes nothing.

Our own reader names the layers by those that the pipeline has. What it cannot name, diffusers may know under another
name; of both readings the one counts that applies more keys.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
from torch import nn

from omni_grpc.adapter.lora_factors import Shapes, as_layers
from omni_grpc.adapter.lora_renaming import NotRenamed, renamed
from omni_grpc.checkpoint.registry import specs
from omni_grpc.loading.adapters import AdapterFile, refused
from omni_grpc.loading.adapters.binding import OTHER, UNKNOWN, ZERO, Bound, Change, bind
from omni_grpc.loading.adapters.keys import Entry
from omni_grpc.types.spec import FileLayout

logger = logging.getLogger(__name__)

DROPPED = "left out by the conversion of diffusers"
"""Why a key changes nothing that diffusers had to rename."""

_ENCODERS: tuple[tuple[str, str], ...] = (
    (r"(text_encoder(?:_[23])?)\.", r"\1"),
    (r"lora_te1?_", "text_encoder"),
    (r"lora_te([23])_", r"text_encoder_\1"),
    (r"text_encoders\.clip_l\.(?:transformer\.)?", "text_encoder"),
    (r"text_encoders\.clip_g\.(?:transformer\.)?", "text_encoder_2"),
)
"""How files name the layers of text encoders, and the component that it is in diffusers."""

_WRAPPER = re.compile(r"text_model[._]")
"""A module around the layers of a text encoder, which newer versions of transformers do without."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What an adapter changes, by component; the keys of the file that do so; and why others do not."""

    changes: Mapping[str, tuple[Change, ...]]
    keys: Mapping[str, frozenset[str]]
    skipped: Mapping[str, str]

    @property
    def used(self) -> frozenset[str]:
        return frozenset().union(*self.keys.values())


def read(file: AdapterFile, pipeline: Any, parts: Mapping[str, nn.Module], known: Mapping[str, Shapes]) -> Reading:
    """What the file changes of these components, whose layers are `known`. Raises ConfigError for the setting `lora`
    where something of it cannot be applied, or nothing of it is.
    """
    if dora := next((entry for entry in file.entries.values() if entry.kind == "DoRA"), None):
        raise refused(
            file.id,
            f"{dora.layer} of {file.path.name} is DoRA, which diffusers would load as a LoRA without its magnitudes; "
            "merge it into the checkpoint, or extract a LoRA from it",
        )
    ours = _bound(file, parts, known)
    reading = ours
    if UNKNOWN in ours.skipped.values():
        try:
            theirs = _renamed(file, pipeline, parts, known)
        except NotRenamed as error:
            logger.info("adapter %s: %s", file.id, error)
            theirs, why = None, str(error)
        else:
            why = ""
        if theirs is not None and len(theirs.used) > len(ours.used):
            reading = theirs
        elif why and not ours.used:
            raise refused(file.id, f"no key of {file.path.name} fits a layer of {type(pipeline).__name__}; {why}")
    if not reading.used:
        first = ", ".join(f"{key} ({why})" for key, why in list(reading.skipped.items())[:4])
        raise refused(file.id, f"no key of {file.path.name} fits a layer of {type(pipeline).__name__}; it has {first}")
    return reading


def _bound(file: AdapterFile, parts: Mapping[str, nn.Module], known: Mapping[str, Shapes]) -> Reading:
    shares = _shares(file, parts)
    denoisers = tuple(name for name in parts if name not in shares)
    others = {layer for entries in shares.values() for layer in entries}
    rest = {layer: entry for layer, entry in file.entries.items() if layer not in others}
    config = {key: value for key, value in file.config.items() if not _of_others(key, denoisers)}
    found: dict[str, Bound] = {}
    for name in denoisers:
        own = dataclasses.replace(file, entries=rest, config=config)
        layouts = _layouts(parts[name])
        found[name] = bind(file.id, own, name, as_layers(known[name]), layouts=layouts, components=denoisers)
    for name, entries in shares.items():
        config = {key.rpartition(".")[2]: value for key, value in file.config.items() if not _of_others(key, (name,))}
        own = dataclasses.replace(file, entries=entries, others=(), config=config)
        found[name] = _bound_encoder(own, known[name])
    for bound in found.values():
        bound.check(file.id)
    keys = {name: bound.keys for name, bound in found.items()}
    used = frozenset().union(*keys.values())
    skipped: dict[str, str] = {}
    for bound in found.values():
        for key, why in bound.skipped.items():
            if key not in used and skipped.get(key, OTHER) == OTHER:
                skipped[key] = why
    return Reading({name: bound.changes for name, bound in found.items()}, keys, skipped)


def _of_others(key: str, components: Sequence[str]) -> bool:
    """Whether a key of a config is for a component, and none of these."""
    component = key.rpartition(".")[0]
    return component not in ("", *components)


def _shares(file: AdapterFile, parts: Mapping[str, nn.Module]) -> dict[str, dict[str, Entry]]:
    """The layers of the components that a file always names, by what they are called there: all but the denoisers."""
    shares: dict[str, dict[str, Entry]] = {name: {} for name, part in parts.items() if not _denoises(name)}
    for layer, entry in file.entries.items():
        name, start = _component(layer, shares)
        if name in shares:
            shares[name][layer] = dataclasses.replace(entry, layer=layer[start:])
    return shares


def _denoises(component: str) -> bool:
    return component in ("unet", "prior", "decoder") or component.startswith("transformer")


def _component(layer: str, shares: Mapping[str, Any]) -> tuple[str, int]:
    """The component that a layer's name begins with, and where the name within it begins; "" for none."""
    for pattern, component in _ENCODERS:
        if match := re.match(pattern, layer):
            return match.expand(component), match.end()
    name = layer.partition(".")[0]
    return (name, len(name) + 1) if name in shares else ("", 0)


def _bound_encoder(file: AdapterFile, known: Shapes) -> Bound:
    """What a file changes of a text encoder, or of another component that it always names. Our reader takes names that
    begin with the wrapper for those of some text encoder.
    """
    paths = {_WRAPPER.sub("", path, count=1): path for path in known}
    entries = {
        layer: dataclasses.replace(entry, layer=_WRAPPER.sub("", entry.layer, count=1))
        for layer, entry in file.entries.items()
    }
    layers = as_layers({short: known[path] for short, path in paths.items()})
    # without a component, since the names do not begin with it any more
    bound = bind(file.id, dataclasses.replace(file, entries=entries), "", layers)
    changes = tuple(
        dataclasses.replace(
            change, parts=tuple(dataclasses.replace(part, module=paths[part.module]) for part in change.parts)
        )
        for change in bound.changes
    )
    return dataclasses.replace(bound, changes=changes)


def _renamed(file: AdapterFile, pipeline: Any, parts: Mapping[str, nn.Module], known: Mapping[str, Shapes]) -> Reading:
    """The same of the file as diffusers names its layers, told by the keys that it has itself. Raises NotRenamed."""
    shares = _shares(file, parts)
    named = {layer for entries in shares.values() for layer in entries}
    rest = {layer: entry for layer, entry in file.entries.items() if layer not in named}
    other = renamed(dataclasses.replace(file, entries=rest), pipeline, [name for name in parts if name not in shares])
    # those of text encoders have names that say which one it is, and keep them
    kept = {layer: file.entries[layer] for layer in named}
    entries = {**other.file.entries, **kept}
    sources = {**other.sources, **{key: frozenset((key,)) for entry in kept.values() for key in entry.keys.values()}}
    reading = _bound(dataclasses.replace(other.file, entries=entries, config=file.config), parts, known)
    # an alpha has no tensor of its own in what came out
    beside = {
        key: frozenset(entry.keys[part] for part in ("alpha", "scalar") if part in entry.keys)
        for entry in file.entries.values()
        for key in entry.keys.values()
    }

    def origins(keys: frozenset[str]) -> frozenset[str]:
        own = frozenset().union(*(sources[key] for key in keys))
        return own.union(*(beside[key] for key in own))

    keys = {name: origins(found) for name, found in reading.keys.items()}
    used = frozenset().union(*keys.values())
    skipped = dict.fromkeys((key for key in file.keys if key not in used), DROPPED)
    for key, why in reading.skipped.items():
        skipped |= {source: why for source in sources[key] if source not in used}
    for entry in file.entries.values():
        if not any(tensor.any() for part, tensor in entry.tensors.items() if part not in ("alpha", "scalar")):
            skipped |= {key: ZERO for key in entry.keys.values() if key not in used}
    return Reading(reading.changes, keys, skipped)


def _layouts(component: nn.Module) -> tuple[FileLayout, ...]:
    """Other names for the layers of a denoiser, where a native model has the same one."""
    name = type(component).__name__
    for spec in specs().values():
        pipeline = getattr(diffusers, spec.name, None)
        if pipeline is not None and spec.layouts:
            hints = inspect.signature(pipeline.__init__).parameters.values()
            if any(name in re.findall(r"\w+", str(hint.annotation)) for hint in hints):
                return spec.layouts
    return ()
