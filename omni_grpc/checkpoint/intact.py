"""Whether the files of a checkpoint are what their names say: no git-lfs pointers, and none that ends early.

Only heads are read, so that this takes no time before a worker starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint import layout
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json

POINTER = b"version https://git-lfs.github.com/spec/"
"""How a pointer of git-lfs begins (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""

DAMAGED = "FILE_DAMAGED"


def fault(file: Path) -> str:
    """What is wrong with a file and how to mend it, or "". Of safetensors files the length is checked, of all others
    whether they are a pointer.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(max(8, len(POINTER)))
        if head.startswith(POINTER):
            return "is a git-lfs pointer and not the file itself: run `git lfs pull` in the folder that was cloned"
        if file.suffix != ".safetensors":
            return ""
        expected = _expected(stream, head, size)
    if expected <= size:
        return ""
    return f"ends early: it has {size:,} bytes, its header says {expected:,} or more; copy or download it again"


def check_files(folder: Path, index: Mapping[str, Any], read: layout.ReadJson, replaced: Collection[str] = ()) -> None:
    """Raises CheckpointError that names every damaged file among those that a pipeline would read. Components in
    `replaced` get their weights from elsewhere. Files that are missing are not looked for here.
    """
    files = layout.files_of(folder)
    names = layout.texts(index, files, str(folder))
    try:
        weights = layout.weights(index, files, str(folder), read, replaced)
    except CheckpointError as error:
        if error.reason != layout.WEIGHTS_MISSING:
            raise
        weights = []  # loading names each weight
    names += [name for part in weights for name in part.files]
    faults = {name: why for name in sorted(set(names)) if (why := fault(folder / name))}
    if faults:
        listed = "; ".join(
            f"{folder / name} (component {name.partition('/')[0]!r}) {why}" for name, why in faults.items()
        )
        raise CheckpointError(listed, reason=DAMAGED)


def _expected(stream: Any, head: bytes, size: int) -> int:
    """Bytes that a safetensors file has by its own header, as far as it can be read: 8 for the length of the header,
    the header, and the tensors.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8:
        return 8
    if length > 100_000_000:
        return 0  # no header at all; whoever loads it says so
    if 8 + length > size:
        return 8 + length
    stream.seek(8)
    try:
        entries = [entry for name, entry in read_json(stream.read(length)).items() if name != "__metadata__"]
        return 8 + length + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return 0  # not a header; whoever loads it says so
