"""How large the components of a checkpoint are, from the headers of its safetensors files: no weight is read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from omni_grpc.checkpoint import layout
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint

DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
"""diffusers' component names of the denoisers."""
CODES = ("F8_E4M3", "I8")
"""Dtypes of weights that stay in 8 bits when they are loaded, as safetensors writes them."""

LARGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""

_BITS = re.compile(r"[A-Z]+(\d+)")
_BLOCK = re.compile(r"(?:^|\.)([A-Za-z_]\w*)\.(\d+)\.")

Header = Mapping[str, tuple[str, Sequence[int]]]
"""Tensors of a file: name -> dtype as safetensors writes it ("BF16"), and shape."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSize:
    """One component with weights. `parameters`: all of them; `in_blocks`, `largest_block`: those in blocks, and in the
    largest block. `stored_bytes`: bytes of its files; `coded`: parameters in blocks that are stored in 8 bits.
    `denoiser`: runs once in each step.
    """

    name: str
    parameters: int
    stored_bytes: int
    in_blocks: int
    coded: int
    largest_block: int
    denoiser: bool


def header(path: Path) -> Header:
    """The tensors of one file. Raises CheckpointError if it is not a safetensors file."""
    with _opened(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= LARGEST_HEADER:
            raise CheckpointError(f"{path} is no safetensors file: its header would have {size} bytes")
        return parse(file.read(size), str(path))


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"weights cannot be read: {plain(error)}") from error


def parse(text: bytes, where: str) -> Header:
    """The tensors that a header names, without "__metadata__". Raises CheckpointError if it is not JSON."""
    try:
        content: Any = read_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        return {name: (entry["dtype"], entry["shape"]) for name, entry in content.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{where} is no safetensors file: its header cannot be read ({error})") from error


def headers(folder: Path, without: Collection[str] = ()) -> dict[str, list[Header]]:
    """Those of a checkpoint, by component, without some of them. Raises CheckpointError as layout.weights does."""

    def read(file: str) -> dict[str, Any]:
        content: dict[str, Any] = read_json((folder / file).read_text(encoding="utf-8"))
        return content

    found = layout.weights(read(layout.INDEX), layout.files_of(folder), str(folder), read, without)
    return {part.component: [header(folder / file) for file in holders(part)] for part in found}


def holders(weights: layout.Weights) -> list[str]:
    """The files that hold tensors: an index of shards holds none."""
    return [file for file in weights.files if file.endswith(".safetensors")]


def parts(checkpoint: Checkpoint, found: Mapping[str, Sequence[Header]]) -> list[ComponentSize]:
    """The components, largest first."""
    denoisers = tuple(checkpoint.spec.weights) or DENOISERS
    made = [_part(name, some, name in denoisers) for name, some in found.items()]
    return sorted(made, key=lambda part: -part.parameters)


def _part(name: str, found: Sequence[Header], denoiser: bool) -> ComponentSize:
    parameters, stored, coded, blocks = 0, 0, 0, Counter[tuple[str, str]]()
    for tensors in found:
        for tensor, (dtype, shape) in tensors.items():
            count = math.prod(shape)
            parameters += count
            bits = _BITS.match(dtype)
            stored += count * int(bits[1]) // 8 if bits else count
            if block := _BLOCK.search(tensor):
                blocks[block[1], block[2]] += count
                coded += count if dtype in CODES else 0
    largest = max(blocks.values(), default=0)
    return ComponentSize(
        name=name,
        parameters=parameters,
        stored_bytes=stored,
        in_blocks=sum(blocks.values()),
        coded=coded,
        largest_block=largest,
        denoiser=denoiser,
    )
