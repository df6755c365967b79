"""Weights of a denoiser from one GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

What the header says is checked before any weight is read: that the file is whole, that it is of the model, that each of
its types is known. Names are the checkpoint's own, or those of a layout in the model's spec.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from omni_grpc.checkpoint.hub import fetch_file
from omni_grpc.checkpoint.intact import fault
from omni_grpc.checkpoint.layout import HUB_FILE
from omni_grpc.config import QuantizationConfig
from omni_grpc.feature_rules.gguf import gguf_files
from omni_grpc.loading.checkpoint import WeightTarget, WeightTargets, assign, expected_shapes, match, prefetched, target
from omni_grpc.loading.sources import Source
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.packed_linear import PackedLinear
from omni_grpc.ops.dequant import PACKINGS, Packing, dequantize
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint, FileLayout, SingleFile, WeightMap

REASON = "BAD_GGUF"
PREFIX = "model.diffusion_model."
"""What some tools put before every name."""
ANY_ARCHITECTURE = ("", "pig")
"""What files say that their tools made for any model: their names have to tell."""
SHAPE_KEY = "comfy.gguf.orig_shape."
"""Where a file keeps the shape of a tensor that was packed in another one, by its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRange:
    """Neighboring elements of a tensor in the file: where their bytes are, and how they are packed."""

    offset: int
    elements: int
    packing: Packing

    @property
    def size(self) -> int:
        return self.packing.bytes_of(self.elements)


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """One tensor by the checkpoint's name: its shape, and the segments that it is made of, one after the other."""

    shape: tuple[int, ...]
    segments: tuple[PackedRange, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file of weights: `tensors` by the names that the checkpoint has for them."""

    path: Path
    tensors: Mapping[str, Packed]

    @classmethod
    def open(cls, path: Path, served: SingleFile, model: str) -> GgufFile:
        """Reads the header of a file that must be for `model`, with `served` describing the files that are supported.

        Raises CheckpointError with the reason BAD_GGUF for a file that cannot be read or is cut off, one of another
        architecture, and by name for tensors of types that are not served.
        """
        fields, found = _header(path)
        architecture = str(fields.get("general.architecture", ""))
        if architecture not in (*served.architectures, *ANY_ARCHITECTURE):
            raise _refused(
                path,
                f"is of architecture {architecture!r}, and {model} takes {' or '.join(served.architectures)}; pass the "
                "GGUF file of this model, or the --model that the file is of",
            )
        unserved = {name: kind for name, (kind, *_) in found.items() if kind not in PACKINGS}
        if unserved:
            first = ", ".join(f"{name} ({kind})" for name, kind in list(unserved.items())[:4])
            of_types = f"of types that are not served: {first}; served: {', '.join(PACKINGS)}"
            raise _refused(path, f"has {len(unserved)} tensors {of_types}")
        tensors = {}
        for name, (kind, shape, offset) in found.items():
            shape = tuple(int(size) for size in fields.get(SHAPE_KEY + name, shape))
            tensors[name] = Packed(shape, (PackedRange(offset, math.prod(shape), PACKINGS[kind]),))
        # files of whole models have other components too, under prefixes of their own
        mine = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        plain = {name.removeprefix(PREFIX): tensor for name, tensor in (mine or tensors).items()}
        layout = next((layout for layout in served.layouts if layout.mark in plain), None)
        return cls(path, plain if layout is None else _translated(path, plain, layout))

    def places(self, module: nn.Module, weights: WeightMap) -> WeightTargets:
        """Where the weights of the file go, and how they are packed. Raises CheckpointError, see checkpoint.match."""
        return {
            source.key.removesuffix(".weight"): WeightTarget(
                name.removesuffix(".weight"), source.rows, self.tensors[source.key].segments[0].packing
            )
            for name, sources in self._match(expected_shapes(module), weights).items()
            for source in sources
            if name.endswith(".weight")
        }

    def load(
        self, module: nn.Module, weights: WeightMap, *, device: torch.device, dtype: torch.dtype, threads: int = 1
    ) -> None:
        """Gives every parameter of `module` its weight, as checkpoint.load_weights does. A PackedLinear gets the bytes
        as they are in the file, everything else numbers.
        """
        wanted = expected_shapes(module)

        def precision(name: str) -> torch.dtype:
            return torch.float32 if weights.in_float32(name) else dtype

        def read(name: str, sources: Sequence[Source]) -> Tensor:
            path, _, leaf = name.rpartition(".")
            if leaf == "weight" and _keeps_bytes(module.get_submodule(path)):
                return self._bytes(self._segments(sources)).to(device)
            weight = torch.empty(wanted[name], dtype=precision(name), device=device)
            return self._unpacked(sources, weight)

        others = {}
        for name, sources in self._match(wanted, weights).items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            buffer = owner.staging_buffer(leaf, precision(name)) if isinstance(owner, AnyLinear) else None
            if buffer is None:
                others[name] = sources
            else:
                assign(module, name, self._unpacked(sources, buffer))
        for name, weight in prefetched(read, others, threads):
            assign(module, name, weight)

    def _match(self, wanted: Mapping[str, tuple[int, ...]], weights: WeightMap) -> dict[str, list[Source]]:
        sources = []
        for key, tensor in self.tensors.items():
            like, shape = wanted.get(target(key, weights)[0]), tensor.shape
            if like is not None and [size for size in like if size > 1] == [size for size in shape if size > 1]:
                # tools add and drop dimensions of one
                shape = like
            sources.append(Source(key, self.path, shape))
        if not any(target(source.key, weights)[0] in wanted for source in sources):
            raise _refused(
                self.path,
                f"names its tensors in no way that is known for this model; it begins with "
                f"{', '.join(list(self.tensors)[:4])}. Pass a file with the names of the diffusers checkpoint, or of "
                "the model's first publication, as ComfyUI-GGUF and its tools write them",
            )
        return match(wanted, sources, weights, self.path)

    def _segments(self, sources: Iterable[Source]) -> list[PackedRange]:
        return [segment for source in sources for segment in self.tensors[source.key].segments]

    def _bytes(self, segments: Sequence[PackedRange]) -> Tensor:
        """uint8 [bytes], in memory of its own and never in a mapped file."""
        out = torch.empty(sum(segment.size for segment in segments), dtype=torch.uint8)
        view, at = out.numpy().data, 0
        with self.path.open("rb", buffering=0) as file:
            for segment in segments:
                file.seek(segment.offset)
                end = at + segment.size
                while at < end:
                    count = file.readinto(view[at:end])
                    if not count:
                        raise _refused(self.path, "has become shorter while it was read")
                    at += count
        return out

    def _unpacked(self, sources: Iterable[Source], weight: Tensor) -> Tensor:
        """`weight`, filled."""
        at, flat = 0, weight.view(-1)
        for segment in self._segments(sources):
            part = flat[at : at + segment.elements]
            dequantize(self._bytes([segment]).to(part.device), segment.packing, part)
            at += segment.elements
        return weight


def open_files(
    config: QuantizationConfig, checkpoint: Checkpoint, tell: Callable[[Loading], None]
) -> dict[str, GgufFile]:
    """Component -> the open GGUF file with its weights, as the setting `gguf_model` names it. A file on the hub is
    downloaded first, and `tell` is told so. Empty for a model without GGUF files. Raises CheckpointError, see
    GgufFile.open.
    """
    served, opened = checkpoint.spec.single_file, {}
    if served is None:
        return {}
    for component, name in gguf_files(config, checkpoint).items():
        path = Path(name)
        if not path.is_file() and (on_hub := HUB_FILE.fullmatch(name)):
            tell(Loading(phase=LoadPhase.DOWNLOADING, component=component, file=on_hub[2]))
            path = fetch_file(*on_hub.groups())
            tell(Loading())
        opened[component] = GgufFile.open(path, served, checkpoint.spec.name)
    return opened


def _keeps_bytes(owner: nn.Module) -> bool:
    """Whether a layer is a PackedLinear, whatever is around it."""
    return isinstance(owner, AnyLinear) and any(isinstance(part, PackedLinear) for part in owner.modules())


def _header(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], int]]]:
    """The fields that matter, and of each tensor its type, its shape and where it begins. The package maps the file;
    nothing of the map is kept, for pages of a map count as memory of the process.
    """
    if path.is_file() and (why := fault(path)):
        raise _refused(path, why)
    try:
        reader = gguf.GGUFReader(path)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name == "general.architecture" or name.startswith(SHAPE_KEY)
        }
        tensors = {
            tensor.name: (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), int(tensor.data_offset))
            for tensor in reader.tensors
        }
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise _refused(path, f"is no GGUF file, or not all of it is there ({plain(error)}); fetch it again") from error
    if not tensors:
        raise _refused(path, "is a GGUF file without tensors")
    return fields, tensors


def _translated(path: Path, tensors: Mapping[str, Packed], layout: FileLayout) -> dict[str, Packed]:
    """Tensors by the checkpoint's names, from those of a layout."""
    pieces: dict[str, list[tuple[int, Packed]]] = {}
    for name, tensor in tensors.items():
        if any(re.search(pattern, name) for pattern in layout.unused):
            continue
        key = name
        for pattern, replacement in layout.renames:
            key = re.sub(pattern, replacement, key)
        for part, place, piece in _cut(path, key, tensor, layout):
            pieces.setdefault(part, []).append((place, piece))
    return {key: _joined(sorted(parts, key=lambda part: part[0])) for key, parts in pieces.items()}


def _cut(path: Path, key: str, tensor: Packed, layout: FileLayout) -> Iterable[tuple[str, int, Packed]]:
    """The parts of a tensor, each with the checkpoint's name of it and its place there."""
    module, _, leaf = key.rpartition(".")
    cuts = next((name for name in layout.cuts if module == name or module.endswith("." + name)), None)
    if cuts is None:
        yield key, 0, tensor
        return
    (segment,), row = tensor.segments, 0
    whole = sum(cut.size for cut in layout.cuts[cuts])
    columns = math.prod(tensor.shape[1:])
    for cut in layout.cuts[cuts]:
        rows = tensor.shape[0] * cut.size // whole
        if tensor.shape[0] % whole or columns % segment.packing.elements:
            raise _refused(path, f"has {key} in a shape {tensor.shape} that cannot be cut into {whole} equal parts")
        offset = segment.offset + segment.packing.bytes_of(row * columns)
        piece = Packed((rows, *tensor.shape[1:]), (PackedRange(offset, rows * columns, segment.packing),))
        yield f"{module.removesuffix(cuts)}{cut.module}.{leaf}", cut.place, piece
        row += rows


def _joined(placed: Sequence[tuple[int, Packed]]) -> Packed:
    pieces = [piece for _, piece in placed]
    if len(pieces) == 1:
        return pieces[0]
    rows = sum(piece.shape[0] for piece in pieces)
    return Packed((rows, *pieces[0].shape[1:]), tuple(segment for piece in pieces for segment in piece.segments))


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"--gguf-model {path} {why}", reason=REASON)
