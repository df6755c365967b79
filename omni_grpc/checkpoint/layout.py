"""Which files of a checkpoint in the diffusers layout a pipeline is loaded from, by name alone.

The same table decides what is fetched from the hub, what a folder must hold, and what `convert` makes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from omni_grpc.types.errors import CheckpointError

INDEX = "model_index.json"
PREFERENCES = "omni_grpc.json"
"""Settings that a checkpoint brings beside this layout, see omni_grpc.checkpoint.overrides. Few have it."""
VARIANTS = ("bf16", "fp16", "fp32")
"""Variants to use for a component without plain weights, the first one that exists."""
WEIGHTS = (
    "diffusion_pytorch_model.safetensors.index{}.json",
    "diffusion_pytorch_model{}.safetensors",
    "model{}.safetensors",
    "model.safetensors.index{}.json",
)
"""What diffusers (the first two) and transformers look for, in their order. {} is "" or a variant, ".fp16"."""
TEXTS = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm"})
"""Suffixes of configs and of what tokenizers and processors read."""
PICKLES = frozenset({".bin", ".ckpt", ".pt", ".pth", ".pkl"})
"""Suffixes of files that torch unpickles: a pickle is a program."""

WEIGHTS_MISSING = "WEIGHTS_MISSING"

HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*):(.+)", re.ASCII)
"""A file of a repository on the hub, ORG/NAME:FILE."""

_SHARD_INDEX = re.compile(r"\.index(\.\w+)?\.json$")
_FOLDER = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_WITHOUT_WEIGHTS = re.compile(
    r"(Scheduler|Tokenizer|TokenizersBackend|Processor|FeatureExtractor)(Fast|Pil)?$|Guid|Mel$"
)

ReadJson = Callable[[str], Mapping[str, Any]]
"""Gives the content of one JSON file of the checkpoint; the path is relative to its root."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weight files of one component. `renamed` maps the name that a loader asks for to the variant in its place."""

    component: str
    files: tuple[str, ...]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)


def components(index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, class) of each component that model_index.json names. Raises CheckpointError for a name that cannot be
    that of a folder right in the checkpoint's.
    """
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        if not _FOLDER.fullmatch(name):
            raise CheckpointError(f"{INDEX} names the component {name[:64]!r}, which is no name of a folder")
        if all(isinstance(part, str) for part in value):
            yield name, value[1]


def texts(index: Mapping[str, Any], files: Collection[str], where: str) -> list[str]:
    """The configs, the preferences, and what tokenizers and processors are made of: every small text file right in a
    component's folder.

    Raises CheckpointError for a component of which there is no such file.
    """
    found = [INDEX, *(file for file in (PREFERENCES,) if file in files)]
    for component, _ in components(index):
        mine = [file for file in _inside(component, files) if PurePosixPath(file).suffix in TEXTS]
        if not mine:
            raise CheckpointError(f"{where} has no config for component {component!r}, which its {INDEX} names")
        found += [file for file in mine if not _SHARD_INDEX.search(file)]
    return found


def weights(
    index: Mapping[str, Any], files: Collection[str], where: str, read: ReadJson, without: Collection[str] = ()
) -> list[Weights]:
    """The safetensors files of every component that has weights, but for those in `without`.

    Raises CheckpointError with the reason UNSAFE_WEIGHTS where a component has pickles alone, and WEIGHTS_MISSING where
    it has nothing to load, or lacks a shard.
    """
    pickled: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    found = []
    for component, kind in components(index):
        if component in without or _WITHOUT_WEIGHTS.search(kind):
            continue
        chosen = _choose(component, files, where, read)
        if chosen is not None:
            found.append(chosen)
            continue
        inside = _inside(component, files)
        pickles = [file for file in inside if PurePosixPath(file).suffix in PICKLES]
        (pickled if pickles else missing)[component] = pickles or inside
    if pickled:
        raise CheckpointError(
            f"{where} has only pickled weights ({_listed(pickled)}); a pickle can run arbitrary code, so only "
            "safetensors are loaded. Convert them: python -m omni_grpc convert DIR OUT, where DIR is this folder, or "
            "the download of `hf download ORG/NAME --local-dir DIR`",
            reason="UNSAFE_WEIGHTS",
        )
    if missing:
        raise CheckpointError(
            f"{where} has no safetensors weights that can be loaded ({_listed(missing)})", reason=WEIGHTS_MISSING
        )
    return found


def shards(content: Mapping[str, Any], where: str) -> list[str]:
    """The file names in the index of a sharded checkpoint. Raises CheckpointError if it is not such an index."""
    names = content.get("weight_map")
    if not isinstance(names, Mapping) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{where} is not an index of weight shards: it has no weight_map of file names")
    for name in names.values():
        if "\\" in name or PurePosixPath(name).name != name:
            raise CheckpointError(f"{where} names the shard {name!r}; a shard must be in the same folder as its index")
    return sorted(set(names.values()))


def files_of(folder: Path) -> list[str]:
    """The files of a folder and of the folders right in it, as relative paths with forward slashes. Links count where
    they lead to a file.
    """
    found = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def some(files: Collection[str], limit: int = 8) -> str:
    """The first few names, for a message."""
    more = f" and {len(files) - limit} more" if len(files) > limit else ""
    return ", ".join(sorted(files)[:limit]) + more


def _choose(component: str, files: Collection[str], where: str, read: ReadJson) -> Weights | None:
    for variant in ("", *VARIANTS):
        for name in WEIGHTS:
            file = f"{component}/{name.format(variant and '.' + variant)}"
            if file not in files:
                continue
            parts = [file]
            if _SHARD_INDEX.search(file):
                parts += [f"{component}/{shard}" for shard in shards(read(file), f"{file} of {where}")]
            if absent := [part for part in parts if part not in files]:
                raise CheckpointError(
                    f"{file} of {where} names shards that do not exist: {', '.join(absent)}", reason=WEIGHTS_MISSING
                )
            renamed = {f"{component}/{name.format('')}": file} if variant else {}
            return Weights(component=component, files=tuple(parts), renamed=renamed)
    return None


def _inside(component: str, files: Collection[str]) -> list[str]:
    """The files right in the folder of a component."""
    return sorted(file for file in files if PurePosixPath(file).parent.as_posix() == component)


def _listed(groups: Mapping[str, list[str]]) -> str:
    return "; ".join(
        f"{component}: {', '.join(PurePosixPath(file).name for file in files) or 'nothing'}"
        for component, files in groups.items()
    )
