"""Damaged adapters, GGUF files and checkpoints: whatever is in them, they load or are refused by name.

They are read as a worker reads them, in a process with little memory, so that a file can neither hang this one nor take
its memory.
"""

from __future__ import annotations

import collections
import copy
import itertools
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from omni_grpc.types.errors import Code

from .fuzz_messages import flipped

SECONDS = 10.0
"""That one file may take."""
MEMORY = 2 << 30
"""Bytes that a reader may take beyond what its libraries do."""
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
KINDS = {"lora": 4, "lora config": 1, "gguf": 3, "weights": 2, "config": 3}
"""What is damaged -> how often."""
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 1.5, 1e308, float("nan"), 1 << 31, 1 << 63, 1 << 70, "", "x", "../x", [], [0], [-1],
    [1, 2, 3], [1 << 62, 4], [1 << 33, 1 << 33], [[]], {}, {"x": 1},
    "F32", "BF16", "F8_E4M3", "I64", "BOOL", "Q4_K", "nan",
)  # fmt: skip

WORDS = (0, 1, 2, 7, 12, 255, 1 << 16, 1 << 28, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)

Answers = collections.Counter[tuple[str, str]]


def fuzz(checkpoint: Path, count: int, *seeds: int) -> tuple[Answers, list[str]]:
    """(What was damaged, outcome) -> files, `count` of each seed, and what should not have been."""
    answers: Answers = collections.Counter()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        workshop = Workshop(checkpoint, Path(scratch))
        reader = Reader(workshop.folder)
        try:
            for seed, index in itertools.product(seeds, range(count)):
                rng = random.Random(f"{seed}:{index}")
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                workshop.damage(kind, rng)
                outcome = reader.read(kind)
                answers[kind, outcome.partition(":")[0]] += 1
                if _is_fault(kind, outcome):
                    problems.append(f"file {seed}:{index} ({kind}): {outcome[:400]}")
                workshop.mend()
                reader.revive()
        finally:
            reader.end()
    return answers, problems


def _is_fault(kind: str, outcome: str) -> bool:
    if outcome.startswith(("INTERNAL", "UNKNOWN")):
        return True
    # a config may ask for a model of any size, the bytes of a file may not
    return "OUT_OF_MEMORY" in outcome and kind != "config"


class Workshop:
    """A copy of a checkpoint, a GGUF file and an adapter; one file of them is damaged at a time."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.folder = folder
        self._damaged: tuple[Path, bytes] | None = None
        shutil.copytree(checkpoint, folder / "model")
        (folder / "adapter").mkdir()
        self._make_adapter()
        self._make_gguf()

    def damage(self, kind: str, rng: random.Random) -> None:
        path = self._path(kind, rng)
        data = path.read_bytes()
        self._damaged = path, data
        made = DAMAGES[path.suffix](data, rng) if rng.random() < 0.75 else raw(data, rng)
        path.write_bytes(made)

    def mend(self) -> None:
        assert self._damaged is not None
        path, data = self._damaged
        path.write_bytes(data)

    def _path(self, kind: str, rng: random.Random) -> Path:
        match kind:
            case "lora":
                return self.folder / "adapter" / "adapter_model.safetensors"
            case "lora config":
                return self.folder / "adapter" / "adapter_config.json"
            case "gguf":
                return self.folder / "model.gguf"
            case "weights":
                return rng.choice(sorted(self.folder.glob("model/*/*.safetensors")))
        return rng.choice(sorted([*self.folder.glob("model/*.json"), *self.folder.glob("model/*/*config.json")]))

    def _make_adapter(self) -> None:
        import safetensors.torch
        import torch

        from omni_grpc.loading.adapters.files import METADATA

        tensors = {
            f"transformer_blocks.{block}.attn.to_{part}.lora_{factor}.weight": torch.ones(2, 128) if factor == "A" else
            torch.ones(128, 2)
            for block in range(2)
            for part in "qkv"
            for factor in "AB"
        }  # fmt: skip
        config = {"lora_alpha": 2, "r": 2, "use_rslora": False, "transformer.lora_alpha": 2}
        folder = self.folder / "adapter"
        safetensors.torch.save_file(
            tensors, folder / "adapter_model.safetensors", {METADATA: json.dumps(config), "format": "pt"}
        )
        (folder / "adapter_config.json").write_bytes(json.dumps(config).encode())

    def _make_gguf(self) -> None:
        import gguf
        import safetensors.torch

        writer = gguf.GGUFWriter(self.folder / "model.gguf", "qwen_image")
        for name, tensor in safetensors.torch.load_file(self.folder / "model" / TRANSFORMER).items():
            values = tensor.float().numpy()
            if values.ndim == 2 and values.shape[1] % 32 == 0:
                codes = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


# --- reading ----------------------------------------------------------------------------------------------------------


class Reader:
    """A process that reads what is damaged, and another one where it does not come back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def read(self, kind: str) -> str:
        """OK, or code, reason and message."""
        try:
            self._connection.send(kind)
            if self._connection.poll(SECONDS):
                return str(self._connection.recv())
            how = f"INTERNAL HANG: no answer within {SECONDS:g} s"
        except (EOFError, ConnectionError):
            how = "INTERNAL DEATH: the process ended"
        self.end()
        return how

    def revive(self) -> None:
        """Starts a new process where the last one has ended."""
        if not self._process.is_alive():
            self._start()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._folder), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(10 * SECONDS):
            raise TimeoutError("the reader does not start")
        self._connection.recv()


def _serve(connection: Connection, folder: Path) -> None:
    from omni_grpc.worker.failure import failure

    logging.disable(logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    connection.send(_load(folder, "config"))  # once, so that its libraries are there before their memory is bounded
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, hard))
    while True:
        try:
            kind = connection.recv()
        except EOFError:
            return
        try:
            outcome = _load(folder, kind)
        except Exception as error:  # noqa: BLE001 - as the worker does, which tells every error
            told = failure(error, "loading the model")
            outcome = f"{told.code} {told.reason}: {told.message}"
            if told.code is Code.INTERNAL:
                outcome += _where(error)
        connection.send(outcome)


def _where(error: BaseException) -> str:
    """The last place in our code."""
    traces, place = error.__traceback__, ""
    while traces is not None:
        name = traces.tb_frame.f_code.co_filename
        if "omni_grpc" in name:
            place = f" (at {Path(name).name}:{traces.tb_lineno})"
        traces = traces.tb_next
    return place


def _load(folder: Path, kind: str) -> str:
    """Reads what is damaged, as a worker does. Raises every refusal."""
    from omni_grpc.checkpoint.registry import open_model
    from omni_grpc.config import EngineConfig
    from omni_grpc.loading.adapters import read_adapter
    from omni_grpc.loading.adapters.binding import bind
    from omni_grpc.resolve.settings import apply_settings
    from omni_grpc.worker.build import build

    if kind.startswith("lora"):
        file = read_adapter("x", folder / "adapter")
        bind("x", file, "transformer", dict.fromkeys(file.entries, (128, 128))).check("x")
        return "OK"
    settings: dict[str, Any] = (
        {"quantization": "gguf", "gguf_model": str(folder / "model.gguf")} if kind == "gguf" else {}
    )
    config = EngineConfig.from_settings(model=str(folder / "model"), warm_up_seconds=0, cpu_threads=1, **settings)
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    build(config, checkpoint, "fuzz", lambda loading: None)
    return "OK"


# --- damage -----------------------------------------------------------------------------------------------------------


def raw(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped near the beginning, cut off, doubled, replaced."""
    head = rng.choice((16, 64, 512, len(data)))
    match rng.randrange(5):
        case 0 | 1:
            return flipped(data[:head], rng) + data[head:]
        case 2:
            return data[: rng.randrange(len(data))]
        case 3:
            at = rng.randrange(min(head, len(data)))
            value = rng.choice((0, 1, 0xFF, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, 1 << 40))
            return data[:at] + value.to_bytes(8, "little") + data[at + 8 :]
        case _:
            return rng.choice((b"", b"\0", b"{", b"\xff" * 100, data[8:], data * 2, bytes(len(data))))


def safetensors_file(data: bytes, rng: random.Random) -> bytes:
    """Another header, or another length for it."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.2:
        wrong = rng.choice((0, 1, 2, length - 1, length + 1, len(data), 100_000_001, 1 << 40, 1 << 63, (1 << 64) - 1))
        return wrong.to_bytes(8, "little") + header + body
    header = json_file(header, rng)
    if rng.random() < 0.3:
        body = rng.choice((b"", body[: len(body) // 2], body + bytes(100), body[4:]))
    return len(header).to_bytes(8, "little") + header + body


def json_file(data: bytes, rng: random.Random) -> bytes:
    """Values changed, removed, renamed; or text that is no JSON object."""
    if rng.random() < 0.2:
        return rng.choice(_TEXTS)
    content = copy.deepcopy(json.loads(data))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change(content, rng)
    return json.dumps(content).encode()


_TEXTS = (
    b"", b"null", b"[]", b"1", b'"x"', b"{}", b"{" * 100_000, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe",
    b"{'a':1}", b'{"x":1e999999}', b'{"x":' + b"9" * 5000 + b"}",
    b'{"a":1,"a":2}', b" " * 1_000_000 + b"{}", b"\xef\xbb\xbf{}",
    b'{"__metadata__":1}', b'{"__metadata__":{"a":[]}}', b'{"_class_name":["x"]}', b'{"\\ud800":1}',
)  # fmt: skip


def _change(content: Any, rng: random.Random) -> None:
    """One value somewhere in a tree."""
    while True:
        keys: list[Any] = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = content[key]
        if not isinstance(inner, dict | list) or rng.random() < 0.25:
            break
        content = inner
    match rng.randrange(6):
        case 0:
            del content[key]
        case 1 if isinstance(content, dict):
            content[rng.choice(("", "x", "a" * 10_000, "../x", f"{key}.x"))] = content.pop(key)
        case 2 if isinstance(inner, int) and not isinstance(inner, bool):
            content[key] = rng.choice((inner + 1, inner - 1, -inner, inner * 2, inner << 40, str(inner), float(inner)))
        case 3 if isinstance(content, dict):
            content[key] = copy.deepcopy(content[rng.choice(keys)])
        case _:
            content[key] = copy.deepcopy(rng.choice(JUNK))


def gguf_file(data: bytes, rng: random.Random) -> bytes:
    """Counts, types, lengths of names, dimensions and offsets of its header: words of it at their extremes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        size = rng.choice((4, 8))
        at = rng.choice((4, 8, 16, 24, rng.randrange(24, 200), rng.randrange(200, 8000)))
        value = rng.choice(
            (0, 1, 2, 7, 12, 255, 1 << 16, 1 << 28, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
        )
        result[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return bytes(result)


DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    ".safetensors": safetensors_file,
    ".json": json_file,
    ".gguf": gguf_file,
}
