"""A weight file written anew, tensor by tensor: the same keys, dtypes and shapes in the same order, and values of which
some are others. Memory holds one tensor (https://github.com/huggingface/safetensors, "format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights that can be changed, by their names in a header."""

_METADATA = "__metadata__"
_CHUNK = 1 << 24


def rewrite(
    source: Path, target: Path, changed: Collection[str], value: Callable[[str], Tensor], notes: Mapping[str, str]
) -> None:
    """Writes `target`: what `value` returns, in any floating dtype, for the keys `changed`, rounded to the dtype that
    they have; the bytes of `source` for all others. `notes` are added to the metadata of its header.

    Raises CheckpointError for a value that is not finite, or of another number of elements.
    """
    with source.open("rb") as old, target.open("xb") as new:
        begin, header = _header(old)
        metadata = {**(header.pop(_METADATA, None) or {"format": "pt"}), **notes}
        text = json.dumps({_METADATA: metadata, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if key in changed:
                new.write(_bytes(key, value(key), entry, source))
            else:
                old.seek(begin + first)
                _copy(old, new, last - first)


def _header(stream: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header. safetensors has no holes between tensors."""
    length = int.from_bytes(stream.read(8), "little")
    return 8 + length, read_json(stream.read(length))


def _bytes(key: str, value: Tensor, entry: Mapping[str, Any], source: Path) -> bytes:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if value.numel() != math.prod(shape):
        raise CheckpointError(f"{key} of {source} has {math.prod(shape)} elements; {value.numel()} were computed")
    stored = value.to(dtype)
    if not stored.isfinite().all():
        raise CheckpointError(
            f"{key} of {source} would have values that are not finite in {entry['dtype']}; use a smaller scale, or a "
            "checkpoint in a wider precision"
        )
    return bytes(stored.contiguous().flatten().view(torch.uint8).numpy())


def _copy(old: BinaryIO, new: BinaryIO, count: int) -> None:
    while count:
        part = old.read(min(count, _CHUNK))
        if not part:
            raise CheckpointError(f"{old.name} ends too early; the file is damaged")
        new.write(part)
        count -= len(part)
