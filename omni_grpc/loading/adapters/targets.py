"""Files that are for one component: as the operator says, or as the name of a file for one of two experts does."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_grpc.loading.adapters.binding import OTHER, Bound, Layers, bind
from omni_grpc.loading.adapters.encoder_names import is_encoder
from omni_grpc.loading.adapters.files import FILES, AdapterFile, read_adapter, refused
from omni_grpc.loading.adapters.keys import Entry
from omni_grpc.loading.adapters.names import is_of_an_encoder, named_component, plain, without_component
from omni_grpc.types.spec import FileLayout


def read_files(name: str, paths: Mapping[str, Path]) -> AdapterFile:
    """Reads the files of an adapter, by the component that each is for; one for "" alone is for all that it fits. Keys
    of several files begin with their component. Raises ConfigError as `read_adapter` does.
    """
    files = {component: read_adapter(name, path) for component, path in paths.items()}
    first = next(iter(files.values()))
    if "" in files:
        return first
    if len(files) > 1:
        files = {component: _marked(file, component) for component, file in files.items()}
    digests = "".join(file.sha256 for file in files.values())
    return AdapterFile(
        id=name,
        path=first.path,
        sha256=first.sha256 if len(files) == 1 else hashlib.sha256(digests.encode()).hexdigest(),
        size_bytes=sum(file.size_bytes for file in files.values()),
        format=", ".join(dict.fromkeys(file.format for file in files.values())),
        keys=tuple(key for file in files.values() for key in file.keys),
        entries={f"{part}: {layer}": entry for part, file in files.items() for layer, entry in file.entries.items()},
        others=tuple(key for file in files.values() for key in file.others),
        config={},
        parts=files,
    )


def bind_targets(
    name: str,
    file: AdapterFile,
    component: str,
    layers: Layers,
    *,
    layouts: Sequence[FileLayout] = (),
    components: Sequence[str] = (),
    denoisers: Sequence[str] = (),
) -> Bound:
    """`bind`, for a file that may be for some components alone. `denoisers`: those that the model has, in order."""
    guess = guessed(file, denoisers)
    if file.parts:
        own = file.parts.get(component)
        mine = None if own is None else _said(own, component)
    elif guess and component in denoisers:
        mine = _said(file, component) if guess == component else _encoders_alone(file)
    else:
        mine = file
    elsewhere = dict.fromkeys(file.keys, OTHER)
    if mine is None:
        return Bound((), elsewhere, {})
    bound = bind(name, mine, component, layers, layouts=layouts, components=components)
    used = bound.keys
    skipped = {key: why for key, why in elsewhere.items() if key not in used} | dict(bound.skipped)
    return dataclasses.replace(bound, skipped=skipped if mine is not file else bound.skipped)


def guessed(file: AdapterFile, denoisers: Sequence[str]) -> str:
    """The expert that the name of a file says it is for, by "high" or "low"; "" for a model that has not two, for a
    file that says so itself, and where the name has neither word or both.
    """
    if len(denoisers) != 2 or file.parts:
        return ""
    named = {named_component(entry.layer) for entry in file.entries.values()}
    name = file.path.parent.name if file.path.name in FILES else file.path.stem
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    found = set(re.findall(r"(?<![a-z])(high|low)(?=noise|[^a-z]|$)", words))
    # what tools write before the names of any denoiser is also the name of the first expert
    return denoisers[found == {"low"}] if named <= {"", denoisers[0]} and len(found) == 1 else ""


def warnings(file: AdapterFile, denoisers: Sequence[str]) -> tuple[str, ...]:
    """What the operator should know of how a file is used."""
    component = guessed(file, denoisers)
    if not component:
        return ()
    both = " ".join(f"--lora {file.id}@{one}=PATH" for one in denoisers)
    return (
        f"{file.path.name} does not say which expert it is for; by its name it is taken for {component}. Say so with "
        f"--lora {file.id}@{component}=PATH, or with {both} that it is for both",
    )


def _said(file: AdapterFile, component: str) -> AdapterFile:
    """A file whose layers are all of a component. The name of another denoiser counts where the file has the
    component's own name as well; without it, tools mean any denoiser by it. Raises ConfigError for a layer that the
    file has twice then.
    """
    named = {named_component(entry.layer) for entry in file.entries.values()}

    def layer(entry: Entry) -> str:
        if is_encoder(component):
            name = plain(entry.layer)
            return entry.layer if is_of_an_encoder(name) else f"{component}.{name}"
        return entry.layer if component in named else without_component(entry.layer)

    kept: dict[str, Entry] = {}
    for entry in file.entries.values():
        if is_encoder(component) or not is_of_an_encoder(plain(entry.layer)):
            renamed = dataclasses.replace(entry, layer=layer(entry))
            if renamed.layer in kept:
                raise refused(file.id, f"it has {renamed.layer} twice; leave one of them out of the file")
            kept[renamed.layer] = renamed
    return dataclasses.replace(file, entries=kept)


def _encoders_alone(file: AdapterFile) -> AdapterFile:
    kept = {layer: entry for layer, entry in file.entries.items() if is_of_an_encoder(plain(layer))}
    return dataclasses.replace(file, entries=kept)


def _marked(file: AdapterFile, component: str) -> AdapterFile:
    """A file whose keys begin with the component, to tell them from those of another file."""

    def marked(key: str) -> str:
        return f"{component}: {key}"

    entries = {
        layer: dataclasses.replace(entry, keys={part: marked(key) for part, key in entry.keys.items()})
        for layer, entry in file.entries.items()
    }
    return dataclasses.replace(
        file, keys=tuple(map(marked, file.keys)), entries=entries, others=tuple(map(marked, file.others))
    )
