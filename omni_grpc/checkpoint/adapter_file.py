"""The file of a LoRA adapter, as far as it can be looked at without torch: which one it is, and that it is whole."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from omni_grpc.checkpoint import sizes
from omni_grpc.checkpoint.intact import fault
from omni_grpc.types.errors import CheckpointError, InvalidArgument, Violation
from omni_grpc.types.os_errors import plain

FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
"""What an adapter's file is called in a folder: by PEFT, by diffusers."""
CONFIG = "adapter_config.json"
"""PEFT's config beside it, without which its scale is not known."""
SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SHOWN = 8
"""Files that a refusal names."""
_PARTS = re.compile(r"lora|hada_|lokr_|oft_|diff|dora_|w_norm|b_norm|set_weight|reshape_weight|\.[ab][12]\.weight$")
"""What one of the keys of any kind of adapter has in it; which of them works is for a worker to say."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A file that looks like an adapter. `sha256` in hex."""

    path: Path
    sha256: str
    size_bytes: int


def chosen(files: Collection[str], filename: str, where: str) -> str:
    """The one of these files that is meant: `filename`, or the only adapter among them. Raises InvalidArgument."""
    found = sorted(file for file in files if file.endswith(SUFFIX))
    if filename:
        if not filename.endswith(SUFFIX):
            raise _refused("filename", f"is {filename!r}; only {SUFFIX} files are read")
        if filename in found:
            return filename
        raise _refused("filename", f"{filename!r} is not in {where}; it has {_some(found)}")
    known = [file for file in FILES if file in found]
    if len(known) == 1 or (not known and len(found) == 1):
        return (known or found)[0]
    if not found:
        pickled = any(file.endswith(PICKLES) for file in files)
        why = "only pickled weights, which are not read" if pickled else "none"
        raise _refused("filename", f"{where} has no {SUFFIX} file: {why}")
    raise _refused("filename", f"is required: {where} has {len(found)} files: {_some(known or found)}")


def check(path: Path) -> Checked:
    """Reads a file once, for its hash. Raises InvalidArgument (BAD_LORA) for one that is damaged, no safetensors file
    or no adapter, whatever model it is for.
    """
    try:
        if why := fault(path):
            raise bad(f"{path.name} {why}")
        keys = sizes.header(path)
        if not any(_PARTS.search(key) for key in keys):
            raise bad(f"{path.name} has no part of an adapter; its keys begin with {', '.join(sorted(keys)[:4])}")
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return Checked(path=path, sha256=digest, size_bytes=path.stat().st_size)
    except CheckpointError as error:
        raise bad(str(error)) from error
    except OSError as error:
        raise bad(f"{path.name} cannot be read: {plain(error)}") from error


def bad(message: str) -> InvalidArgument:
    """The refusal of a file."""
    return InvalidArgument(message, reason="BAD_LORA", violations=(Violation("source", message),))


def _refused(field: str, description: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {description}", violations=(Violation(field, description),))


def _some(files: Collection[str]) -> str:
    named = ", ".join(list(files)[:SHOWN]) or "none"
    return named + (f" and {len(files) - SHOWN} more" if len(files) > SHOWN else "")
