"""Weights of our own modules, streamed from safetensors one tensor at a time.

The headers are read first: every key is matched to a parameter and every shape is compared before any weight moves, so
a checkpoint that does not fit is refused as a whole, with all that is wrong with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from torch import Tensor, nn

from omni_grpc.loading.sources import CODES, WEIGHT_SCALE, Source, codes, paired, scales, stored_as, value
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.ops.dequant import Packing
from omni_grpc.ops.host import READ_THREADS, HostLibraryError, Reading
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import WeightMap

WEIGHT_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = WEIGHT_FILE + ".index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a module's weight in the checkpoint goes: the path of our module, and which rows of its weight (None: all).
    `packing` is that of a file of packed weights; `codes` is the dtype of a weight that is stored in 8 bits.
    """

    path: str
    rows: slice | None = None
    packing: Packing | None = None
    codes: torch.dtype | None = None


WeightTargets = Mapping[str, WeightTarget]
"""The places of all weights, by the name that the checkpoint gives the module."""

T = TypeVar("T")


def places(module: nn.Module, folder: Path, weights: WeightMap) -> WeightTargets:
    """Where load_weights would put each weight. Raises CheckpointError as it does."""
    with _headers(folder) as (_, found):
        matched = match(expected_shapes(module), found, weights, folder)
    return {
        source.key.removesuffix(".weight"): WeightTarget(
            name.removesuffix(".weight"), source.rows, codes=stored_as(sources)
        )
        for name, sources in matched.items()
        for source in sources
        if name.endswith(".weight")
    }


def weight_shapes(folder: Path, *others: str) -> dict[str, tuple[int, ...]]:
    """The shape of every weight in a folder, by the name of its module; and of `others`, which are the last parts of
    names, by their whole names. Raises CheckpointError as `places` does.
    """
    with _headers(folder) as (_, found):
        return {
            source.key.removesuffix(".weight"): source.shape
            for source in found
            if source.key.rpartition(".")[2] in ("weight", *others)
        }


def load_weights(
    module: nn.Module,
    folder: Path,
    weights: WeightMap,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    threads: int = 1,
) -> None:
    """Gives every parameter of `module` (built on the meta device) its weight from `folder`, on `device` and in
    `dtype`, or in float32 where `weights.float32` matches its name.

    `threads` parameters are read and converted in parallel, and no more are in flight at a time. A linear layer loads
    its tensors itself, so one that keeps a shard or quantizes never holds more than that; a layer with a staging buffer
    on the host gets them there, read from the files by several threads at the end. A weight stored in 8 bits goes as it
    is, after its row scales, to a layer that computes in that dtype; any other module gets it dequantized. Parameters
    own their memory, never a mapped file, and do not require gradients. Raises CheckpointError that names every
    missing, every unexpected and every misshapen weight.
    """
    wanted, reading, header = expected_shapes(module), Reading(), functools.cache(_header)
    with _headers(folder) as (handles, found):

        def precision(name: str) -> torch.dtype:
            return torch.float32 if weights.in_float32(name) else dtype

        def copy(weight: Tensor, source: Source) -> None:
            target = _part(weight, source)
            target.copy_(value(source, handles).reshape(target.shape))

        def read(name: str, sources: Sequence[Source]) -> dict[str, Tensor]:
            """One parameter as tensors: the weight, or for a layer in 8 bits the scales of its rows and then the
            weight.
            """
            path, _, leaf = name.rpartition(".")
            owner, kind = module.get_submodule(path), stored_as(sources)
            reads = owner.stored_dtype if isinstance(owner, AnyLinear) else None
            if kind is not None and reads == kind and leaf == "weight":
                scale = torch.empty(wanted[name][0], device=device)
                weight = torch.empty(wanted[name], dtype=kind, device=device)
                for source in sources:
                    _part(scale, source).copy_(scales(source, handles))
                    _part(weight, source).copy_(codes(source, handles).flatten(1))
                return {f"{path}.{WEIGHT_SCALE}": scale, name: weight}
            weight = torch.empty(wanted[name], dtype=precision(name), device=device)
            for source in sources:
                copy(weight, source)
            return {name: weight}

        others = {}
        for name, sources in match(wanted, found, weights, folder).items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            buffer = owner.staging_buffer(leaf, precision(name)) if isinstance(owner, AnyLinear) else None
            if buffer is None:
                others[name] = sources
                continue
            for source in sources:
                if Reading.possible() and _dtype(handles[source.file], source.key) == buffer.dtype:
                    reading.add(source.file, _begin(source, *header(source.file)), _part(buffer, source))
                else:
                    copy(buffer, source)
            assign(module, name, buffer)
        for _, tensors in prefetched(read, others, threads):
            for name, tensor in tensors.items():
                assign(module, name, tensor)
        try:
            reading.run(1 if threads == 1 else max(threads, READ_THREADS))
        except HostLibraryError as error:
            raise CheckpointError(f"the weights in {folder} cannot be read: {plain(error)}") from error


def _part(weight: Tensor, source: Source) -> Tensor:
    return weight if source.rows is None else weight[source.rows]


def assign(module: nn.Module, name: str, weight: Tensor) -> None:
    """Assigns a weight [...], of any shape, to a parameter, or passes it to the linear layer that owns it."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, AnyLinear):
        owner.load_tensor(leaf, weight)
    else:
        setattr(owner, leaf, nn.Parameter(weight, requires_grad=False))


def _dtype(handle: Any, key: str) -> torch.dtype | None:
    """The dtype of a tensor in a file, None for one that has to be converted."""
    return {"F32": torch.float32, "BF16": torch.bfloat16}.get(handle.get_slice(key).get_dtype())


def _begin(source: Source, length: int, header: Mapping[str, Any]) -> int:
    """The byte of its file at which a tensor begins (https://github.com/huggingface/safetensors, "format"): behind the
    length of the header, eight bytes, and the header itself.
    """
    return int(8 + length + header[source.key]["data_offsets"][0])


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return length, read_json(stream.read(length))


def prefetched(
    read: Callable[[str, Sequence[Source]], T], matched: Mapping[str, Sequence[Source]], threads: int
) -> Iterator[tuple[str, T]]:
    """Yields each parameter with what `read` returns for it, in order; up to `threads` are read ahead."""
    if threads == 1:
        yield from ((name, read(name, sources)) for name, sources in matched.items())
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="omni_grpc-weights") as pool:
        waiting: deque[tuple[str, Future[T]]] = deque()
        try:
            for name, sources in matched.items():
                if len(waiting) == threads:
                    first, weight = waiting.popleft()
                    yield first, weight.result()
                waiting.append((name, pool.submit(read, name, sources)))
            while waiting:
                first, weight = waiting.popleft()
                yield first, weight.result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _headers(folder: Path) -> Iterator[tuple[Mapping[Path, Any], list[Source]]]:
    """The open files of a folder, and every tensor in them, scales with their weights."""
    with contextlib.ExitStack() as stack:
        handles = {file: stack.enter_context(_open(file)) for file in _files(folder)}
        found = [
            Source(key, file, tuple(part.get_shape()), codes=CODES.get(part.get_dtype()))
            for file, handle in handles.items()
            for key in handle.keys()  # noqa: SIM118 - the handle is no mapping
            for part in (handle.get_slice(key),)
        ]
        yield handles, paired(found, folder)


def expected_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The name and the shape of every tensor that the module expects of a checkpoint."""
    return {
        f"{path}.{leaf}" if path else leaf: shape
        for path, owner in _owners(module)
        for leaf, shape in _shapes(owner).items()
    }


def _owners(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with weights of its own, by path. What is inside of a linear layer is left to that layer."""
    yield path, module
    if not isinstance(module, AnyLinear):
        for name, child in module.named_children():
            yield from _owners(child, f"{path}.{name}" if path else name)


def _shapes(owner: nn.Module) -> dict[str, tuple[int, ...]]:
    if isinstance(owner, AnyLinear):
        return owner.shapes()
    return {name: tuple(parameter.shape) for name, parameter in owner.named_parameters(recurse=False)}


def _open(file: Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {plain(error)}") from error


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHT_FILE).is_file():
            raise CheckpointError(f"{folder} has no weights: neither {WEIGHT_FILE} nor {INDEX_FILE} is there")
        return [folder / WEIGHT_FILE]
    try:
        shards = sorted(set(read_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weight shards: {plain(error)}") from error
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(f"{index} names shards that do not exist: {', '.join(absent)}")
    return [folder / shard for shard in shards]


def match(
    wanted: Mapping[str, tuple[int, ...]], found: Iterable[Source], weights: WeightMap, where: Path
) -> dict[str, list[Source]]:
    """Parameter -> the sources that fill it, in order. Raises CheckpointError where the two do not match exactly."""
    unexpected: list[str] = []
    pieces: dict[str, dict[int, Source]] = {}
    for source in found:
        name, place = target(source.key, weights)
        if name not in wanted or place in pieces.get(name, {}):
            unexpected.append(source.key)
        else:
            pieces.setdefault(name, {})[place] = source
    parts = {name: _parts(name, weights) for name in wanted}
    missing = [
        f"{name}" + (f" (part {part})" if part else "")
        for name in wanted
        for place, part in enumerate(parts[name])
        if place not in pieces.get(name, {})
    ]
    matched = {name: _stacked([placed[place] for place in sorted(placed)]) for name, placed in pieces.items()}
    misshapen = [
        f"{' + '.join(f'{source.key} {source.shape}' for source in sources)}, expected {wanted[name]}"
        for name, sources in matched.items()
        if len(sources) == len(parts[name]) and not _fills(sources, wanted[name])
    ]
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(f"the weights in {where} do not fit the model. {listed}")
    return matched


def target(key: str, weights: WeightMap) -> tuple[str, int]:
    """The parameter that a key of the checkpoint belongs to, and its place among the parts of that parameter."""
    for pattern, replacement in weights.renames:
        key = re.sub(pattern, replacement, key)
    module, _, leaf = key.rpartition(".")
    for fused, parts in weights.fused.items():
        for place, part in enumerate(parts):
            if module == part or module.endswith("." + part):
                return f"{module.removesuffix(part)}{fused}.{leaf}", place
    return key, 0


def _parts(name: str, weights: WeightMap) -> tuple[str, ...]:
    """What a parameter is made of: the parts of a fused one, else itself, which needs no name."""
    module = name.rpartition(".")[0]
    for fused, parts in weights.fused.items():
        if module == fused or module.endswith("." + fused):
            return parts
    return ("",)


def _stacked(sources: list[Source]) -> list[Source]:
    if len(sources) == 1:
        return sources
    ends = itertools.accumulate(source.shape[0] for source in sources)
    return [
        dataclasses.replace(source, rows=slice(end - source.shape[0], end))
        for source, end in zip(sources, ends, strict=True)
    ]


def _fills(sources: list[Source], shape: tuple[int, ...]) -> bool:
    """Whether the sources, stacked along their first dimension, have the shape. A convolution whose stride is its
    kernel is a linear layer on patches: its weight [out, C, kernel...] counts as [out, C * kernel...].
    """
    flat = [(source.shape[0], math.prod(source.shape[1:])) if len(shape) == 2 else source.shape for source in sources]
    if len(sources) == 1:
        return flat[0] == shape
    rows = sum(source[0] for source in flat)
    return all((rows, *source[1:]) == shape for source in flat)
