"""`python -m omni_grpc convert DIR OUT`: the same checkpoint with safetensors in place of pickled weights.

Pickles are read with torch's restricted unpickler (weights_only), which builds tensors and calls nothing else; one that
needs more is refused. Files are taken one at a time, so memory holds one shard.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import re
import shutil
import sys
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from omni_grpc.checkpoint import layout
from omni_grpc.checkpoint.intact import DAMAGED, fault
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import CheckpointError, OmniError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.os_errors import plain, reason

_PICKLED = re.compile(r"(?P<stem>diffusion_pytorch_model|pytorch_model)(?P<tail>(\.\w+)?(-\d+-of-\d+)?(\.\w+)?)\.bin")
_PICKLED_INDEX = re.compile(r"(?P<stem>diffusion_pytorch_model|pytorch_model)\.bin\.index(?P<variant>\.\w+)?\.json")
_STEMS: Mapping[str, str] = {"diffusion_pytorch_model": "diffusion_pytorch_model", "pytorch_model": "model"}
"""How each library calls pickled weights, and safetensors."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """One file that was made: its path in OUT, the tensors in it, and their bytes."""

    file: str
    tensors: tuple[str, ...]
    size: int


def convert(source: Path, target: Path) -> list[Converted]:
    """Writes `target`, which must not exist yet, from the checkpoint in `source`: each pickled weight file becomes
    safetensors under the name that its library asks for, with the same keys, shapes, dtypes and bits; shard indexes
    name the new files; everything else is copied.

    Raises CheckpointError where `source` is no checkpoint, has no pickled weights, or has one that cannot be converted;
    `target` is then not made.
    """
    if target.exists():
        raise CheckpointError(f"{target} already exists; name a new folder")
    if not (source / layout.INDEX).is_file():
        raise CheckpointError(f"{source} has no {layout.INDEX}: it is not a checkpoint in the diffusers layout")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        made = _convert(source, unfinished)
        unfinished.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{source} is not converted to {target}: {plain(error)}; nothing of it is left", reason="FILE_NOT_WRITTEN"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return made


def new_name(name: str) -> str | None:
    """What a file of pickled weights, or the index of its shards, is called as safetensors; None for any other file."""
    if index := _PICKLED_INDEX.fullmatch(name):
        return f"{_STEMS[index['stem']]}.safetensors.index{index['variant'] or ''}.json"
    if pickled := _PICKLED.fullmatch(name):
        return f"{_STEMS[pickled['stem']]}{pickled['tail']}.safetensors"
    return None


def _convert(source: Path, target: Path) -> list[Converted]:
    made: list[Converted] = []
    indexes: list[tuple[Path, Path]] = []
    for path in _walk(source):
        file = path.relative_to(source)
        name = new_name(path.name)
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if name is None:
            _refuse_unknown_pickle(path, file)
            shutil.copyfile(path, target / file)
        elif (path.parent / name).is_file():
            continue  # it has its safetensors twin already, which is copied
        elif path.suffix == ".json":
            indexes.append((path, target / file.with_name(name)))
        else:
            made.append(_convert_file(path, target / file.with_name(name), file.with_name(name).as_posix()))
    if not made:
        raise CheckpointError(f"{source} has no pickled weights to convert")
    for old, new in indexes:
        _convert_index(old, new, {Path(one.file).name: one for one in made if (target / one.file).parent == new.parent})
    return made


def _walk(folder: Path) -> list[Path]:
    """Every file below a folder, hidden ones left out. Links to files are files; a link to a folder is refused."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.is_symlink():
                raise CheckpointError(f"{path} is a link to a folder; convert a checkpoint without links to folders")
            found += _walk(path)
        else:
            found.append(path)
    return found


def _refuse_unknown_pickle(path: Path, file: Path) -> None:
    if path.suffix in layout.PICKLES and len(file.parts) > 1:
        raise CheckpointError(
            f"{path} has a pickle's extension, but no library loads weights of that name; remove it, or rename it to "
            f"{' or '.join(stem + '.bin' for stem in _STEMS)}",
            reason="UNSAFE_WEIGHTS",
        )


def _convert_file(path: Path, new: Path, file: str) -> Converted:
    tensors = _read(path)
    try:
        safetensors.torch.save_file(tensors, new, metadata={"format": "pt"})
    except (safetensors.SafetensorError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written as safetensors: {plain(error)}") from error
    _verify(path, new, tensors)
    return Converted(file=file, tensors=tuple(tensors), size=sum(tensor.nbytes for tensor in tensors.values()))


def _read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle. Each gets memory of its own: safetensors has no way to say that two share theirs."""
    if why := fault(path):
        raise CheckpointError(f"{path} {why}", reason=DAMAGED)
    try:
        # only the newer format, a zip file, can be mapped rather than read
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} needs more than tensors to be unpickled ({_wanted(path, error)}), which would run arbitrary code; "
            "it is not converted",
            reason="UNSAFE_PICKLE",
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a file of torch weights: {plain(error)}") from error
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} contains a {type(content).__name__}, expected named tensors")
    if odd := [str(key) for key, value in content.items() if not _plain(key, value)]:
        raise CheckpointError(f"{path} contains more than named dense tensors: {', '.join(odd[:8])}")
    seen: set[int] = set()
    tensors = {}
    for key, value in content.items():
        tensor = value.detach().contiguous()
        shared = tensor.untyped_storage().data_ptr() in seen or tensor.untyped_storage().nbytes() != tensor.nbytes
        tensors[key] = tensor.clone() if shared else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    return tensors


def _plain(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided


def _wanted(path: Path, error: pickle.UnpicklingError) -> str:
    """What the pickle asks for, without torch's advice to allow it."""
    if zipfile.is_zipfile(path):
        try:
            if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
                return ", ".join(names)
        except (pickle.UnpicklingError, RuntimeError, ValueError):
            return "an instruction that weights do not need"
    found = re.search(r"(?:GLOBAL|global) `?([\w.]+)", str(error))
    return found[1] if found else "an instruction that weights do not need"


def _verify(path: Path, new: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads what was written and compares every bit."""
    with safetensors.safe_open(new, framework="pt", device="cpu") as written:
        if set(written.keys()) != set(tensors):
            raise CheckpointError(f"{new} does not contain the tensors of {path}")
        for key, tensor in tensors.items():
            copy = written.get_tensor(key)
            same = copy.dtype == tensor.dtype and copy.shape == tensor.shape
            if not same or not torch.equal(_bytes(copy), _bytes(tensor)):
                raise CheckpointError(f"{new}: {key} differs from {path}; check the disk")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _convert_index(old: Path, new: Path, made: Mapping[str, Converted]) -> None:
    """Writes the index of the new shards, from what is in them."""
    try:
        content: dict[str, Any] = read_json(old.read_text(encoding="utf-8"))
        renamed = {name: new_name(name) for name in layout.shards(content, str(old))}
        listed: Mapping[str, str] = content["weight_map"]
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{old} is not an index of weight shards: {error}") from error
    if absent := [name for name, shard in renamed.items() if shard not in made]:
        raise CheckpointError(f"{old} names shards that do not exist: {', '.join(absent)}")
    shards = [made[shard] for shard in renamed.values() if shard]
    weight_map = {key: Path(shard.file).name for shard in shards for key in shard.tensors}
    if wrong := sorted(key for key, name in listed.items() if weight_map.get(key) != renamed[name]):
        raise CheckpointError(f"{old} names weights that are not in their shards: {', '.join(wrong[:8])}")
    if extra := sorted(weight_map.keys() - listed.keys()):
        raise CheckpointError(f"{old} does not name weights of its shards: {', '.join(extra[:8])}")
    metadata = dict(content.get("metadata") or {}) | {"total_size": sum(shard.size for shard in shards)}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    new.write_text(text + "\n", encoding="utf-8")


def _folder(text: str) -> Path:
    if not text.strip():  # which a path takes for the current folder
        raise argparse.ArgumentTypeError("is empty; name a folder")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Converts, and prints a line for each file that it wrote. The exit code is 2 if it cannot."""
    parser = Parser(
        prog="omni-grpc convert",
        description="Converts the pickled weights of a checkpoint to safetensors. Does not run the code of a pickle.",
    )
    parser.add_argument("source", type=_folder, metavar="DIR", help="checkpoint folder in the diffusers layout")
    parser.add_argument("target", type=_folder, metavar="OUT", help="folder to create")
    args = parser.parse_args(argv)
    quiet_libraries()
    try:
        for one in convert(args.source, args.target):
            print(f"{one.file}: {len(one.tensors)} tensors, {one.size} bytes, verified")
    except OmniError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.target}: {reason(error)}", file=sys.stderr)
        return 2
    print(args.target)
    return 0
