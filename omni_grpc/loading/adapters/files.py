"""Finding and reading the file of an adapter, and the config that belongs to it."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from omni_grpc.checkpoint.intact import fault
from omni_grpc.loading.adapters.keys import Entry, layout, sorted_entries
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain as plain_text

logger = logging.getLogger(__name__)

FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
"""What an adapter's file is called in a folder: by PEFT, by diffusers."""

CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"
"""Where diffusers keeps a config in the header of the file, as JSON."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter as it is in its file. `entries`: its tensors by the layer as the file names it; `others`: keys that
    are no part of an adapter; `config`: PEFT's, beside the file or in its header. `parts`: where it is for some
    components alone, by component what is for each, which may be a file of its own.
    """

    id: str
    path: Path
    sha256: str
    size_bytes: int
    format: str
    keys: tuple[str, ...]
    entries: Mapping[str, Entry]
    others: tuple[str, ...]
    config: Mapping[str, Any]
    parts: Mapping[str, AdapterFile] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its files, with the component that each is for, where that is said."""
        named = ", ".join(f"{file.path.name} ({component})" for component, file in self.parts.items())
        return named or self.path.name

    @property
    def rank(self) -> int:
        """The largest of its layers; 0 where none has factors."""
        return max((entry.rank for entry in self.entries.values()), default=0)


def read_adapter(name: str, path: Path) -> AdapterFile:
    """Reads the file `path`, or the only one of its names in the folder `path`. Raises ConfigError for the setting
    `lora` where it is not there, is no safetensors file, has nothing of an adapter, or has one part of a layer twice.
    """
    file = _file(name, path)
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 - the handle is no mapping
    except (OSError, safetensors.SafetensorError) as error:
        why = fault(file) or f"is no safetensors file: {plain_text(error)}"
        raise refused(name, f"{file} {why}") from error
    entries, others, twice = sorted_entries(tensors)
    if not any(entry.kind != "none" for entry in entries.values()):
        raise refused(name, f"{file} has no LoRA layers; it begins with {', '.join(sorted(tensors)[:4])}")
    if twice:
        raise refused(
            name, f"{file} has {twice[0][0]} and {twice[0][1]}, which are the same; keep one adapter in a file"
        )
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return AdapterFile(
        id=name,
        path=file,
        sha256=digest,
        size_bytes=file.stat().st_size,
        format=layout(tensors, metadata),
        keys=tuple(tensors),
        entries=entries,
        others=tuple(others),
        config=_config(name, file, metadata),
    )


def refused(name: str, why: str) -> ConfigError:
    """The error for one adapter of the setting `lora`."""
    message = f"--lora {name}: {why}"
    return ConfigError(message, reason="BAD_LORA", violations=(Violation("lora", message),))


def _file(name: str, path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / file for file in FILES if (path / file).is_file()]
    if len(found) == 1:
        return found[0]
    raise refused(name, f"{path} is neither a file nor a folder with one of {', '.join(FILES)}")


def _config(name: str, file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """PEFT's config: that of the folder where it is this file's, else the one in the header. Keys may begin with the
    component they are for.
    """
    where, text = f"the header of {file}", metadata.get(METADATA, "{}")
    try:
        if (beside := file.parent / CONFIG).is_file():
            owner = _owner(file.parent)
            if owner == file.name:
                where, text = str(beside), beside.read_text(encoding="utf-8")
            else:
                logger.warning("adapter %s: %s is not of %s and is not used", name, beside, file.name)
        found = read_json(text)
    except (OSError, ValueError) as error:
        raise refused(name, f"its config is not JSON: {where}: {plain_text(error)}") from error
    if not isinstance(found, dict):
        raise refused(name, f"its config is not a JSON object: {where}")
    for key, value in found.items():
        leaf = key.rpartition(".")[2]
        if leaf in ("lora_alpha", "alpha") and not _is_number(value):
            raise refused(name, f"{key} in {where} is {value!r}; it must be a finite number")
        if leaf == "alpha_pattern" and (wrong := _wrong_pattern(value)):
            raise refused(name, f"{key} in {where} {wrong}")
    return found


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _wrong_pattern(value: object) -> str:
    """What is wrong with an alpha_pattern, "" if nothing is."""
    if value is not None and not isinstance(value, dict):
        return f"is {value!r}; it must be an object of patterns and numbers"
    for pattern, alpha in (value or {}).items():
        if not _is_number(alpha):
            return f"has {alpha!r} for {pattern!r}; it must be a finite number"
        try:
            re.compile(pattern)
        except re.error as error:
            return f"has {pattern!r}, which is no regular expression: {error}"
    return ""


def _owner(folder: Path) -> str:
    """The file that the config of a folder is for: PEFT's own, or the only one there is; "" where it could be any."""
    if (folder / FILES[0]).is_file():
        return FILES[0]
    files = [path.name for path in folder.glob("*.safetensors")]
    return files[0] if len(files) == 1 else ""


def for_layer(file: AdapterFile, layer: str) -> dict[str, Any]:
    """What the config says of one layer: keys without a component, and those of the component that the layer's name
    begins with. A layer that names none takes those of the only component. Raises ConfigError where several differ.
    """
    parts: dict[str, dict[str, Any]] = {}
    for key, value in file.config.items():
        component, _, leaf = key.rpartition(".")
        parts.setdefault(component, {})[leaf] = value
    common = parts.pop("", {})
    first = layer.partition(".")[0]
    if first in parts or not parts:
        return {**common, **parts.get(first, {})}
    for key in ("lora_alpha", "use_rslora", "alpha_pattern"):
        if len({repr(part.get(key)) for part in parts.values()}) > 1:
            raise refused(
                file.id, f"{layer} names no component, and {key} differs in the configs of {', '.join(parts)}"
            )
    return {**common, **next(iter(parts.values()))}
