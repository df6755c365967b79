"""The weight loader, on checkpoints that fit and on copies that do not."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.loading import checkpoint
from omni_grpc.loading.checkpoint import INDEX_FILE, WEIGHT_FILE, load_weights, prefetched
from omni_grpc.models.qwen_image import TRANSFORMER_WEIGHTS
from omni_grpc.models.qwen_image.qwen_image_transformer import QwenImageTransformer
from omni_grpc.types.errors import CheckpointError

BLOCK = "transformer_blocks.1"


@pytest.fixture
def folder(tiny_qwen_image: Path, tmp_path: Path) -> Path:
    """A copy of the transformer's folder, to be changed."""
    return Path(shutil.copytree(tiny_qwen_image / "transformer", tmp_path / "transformer"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> QwenImageTransformer:
    with torch.device("meta"):
        module = QwenImageTransformer.from_config(json.loads((folder / "config.json").read_text()))
    load_weights(module, folder, TRANSFORMER_WEIGHTS, device="cpu", dtype=dtype)
    return module


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHT_FILE)
    change(weights)
    safetensors.torch.save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / WEIGHT_FILE)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


def test_parts_are_fused_in_order(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHT_FILE)
    loaded = load(folder).state_dict()
    for leaf in ("weight", "bias"):
        expected = torch.cat([weights[f"{BLOCK}.attn.to_{part}.{leaf}"] for part in "qkv"])
        assert torch.equal(loaded[f"stack.dual.1.attn.to_qkv.{leaf}"], expected)
    assert torch.equal(loaded["stack.dual.1.txt_mod.bias"], weights[f"{BLOCK}.txt_mod.1.bias"])
    assert sum(weight.numel() for weight in loaded.values()) == sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_dtype_and_memory_of_their_own(folder: Path, dtype: torch.dtype) -> None:
    module = load(folder, dtype)
    (folder / WEIGHT_FILE).write_bytes(b"")
    for parameter in module.parameters():
        assert parameter.dtype == dtype
        assert not parameter.requires_grad
        assert parameter.data_ptr() % 64 == 0
        assert parameter.isfinite().all()


def test_shards_are_one_checkpoint(folder: Path) -> None:
    whole = load(folder).state_dict()
    weights = safetensors.torch.load_file(folder / WEIGHT_FILE)
    places = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(weights)}
    for shard in set(places.values()):
        safetensors.torch.save_file({n: w for n, w in weights.items() if places[n] == shard}, folder / shard)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHT_FILE).unlink()
    sharded = load(folder).state_dict()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)

    (folder / "part-1.safetensors").unlink()
    assert "names shards that do not exist: part-1.safetensors" in refused(folder)
    (folder / INDEX_FILE).write_text("{}")
    assert "is not an index of weight shards" in refused(folder)


def test_every_missing_and_every_unexpected_weight_is_named(folder: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        del weights["img_in.bias"], weights[f"{BLOCK}.attn.to_k.weight"]
        weights["surplus.weight"], weights[f"{BLOCK}.surplus.bias"] = torch.zeros(1), torch.zeros(1)

    edit(folder, change)
    message = refused(folder)
    assert "missing: img_in.bias, stack.dual.1.attn.to_qkv.weight (part attn.to_k)" in message
    assert "unexpected: " in message
    assert "surplus.weight" in message
    assert f"{BLOCK}.surplus.bias" in message
    assert "wrong shape" not in message


def test_every_misshapen_weight_is_named_with_both_shapes(folder: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights["proj_out.weight"] = torch.zeros(64, 127)
        weights[f"{BLOCK}.attn.to_v.bias"] = torch.zeros(100)
        weights[f"{BLOCK}.attn.add_v_proj.weight"] = torch.zeros(128, 64)

    edit(folder, change)
    message = refused(folder)
    assert "proj_out.weight (64, 127), expected (64, 128)" in message
    assert f"{BLOCK}.attn.to_v.bias (100,), expected (384,)" in message
    assert f"{BLOCK}.attn.add_v_proj.weight (128, 64), expected (384, 128)" in message
    assert "missing" not in message


def test_a_folder_without_weights_and_a_file_that_is_none(folder: Path) -> None:
    (folder / WEIGHT_FILE).write_bytes(b"not safetensors")
    assert "is no safetensors file" in refused(folder)
    (folder / WEIGHT_FILE).unlink()
    assert "has no weights" in refused(folder)


def test_threads_read_the_same(folder: Path) -> None:
    expected = load(folder, torch.bfloat16).state_dict()
    with torch.device("meta"):
        module = QwenImageTransformer.from_config(json.loads((folder / "config.json").read_text()))
    load_weights(module, folder, TRANSFORMER_WEIGHTS, device="cpu", dtype=torch.bfloat16, threads=3)
    loaded = module.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_so_many_threads_read_and_so_many_parameters_are_on_their_way() -> None:
    started: list[str] = []
    names = [str(number) for number in range(20)]
    together = threading.Barrier(3, timeout=20)

    def read(name: str, sources: object) -> Tensor:
        started.append(threading.current_thread().name)
        if int(name) < 3:
            together.wait()  # for ever, unless three of them read at once
        return torch.tensor(int(name))

    taken = []
    for name, weight in prefetched(read, {name: [] for name in names}, 3):
        taken.append(name)
        assert weight.item() == int(name)
        assert len(started) <= len(taken) + 3
    assert taken == names
    assert {name.rpartition("_")[0] for name in started} == {"omni_grpc-weights"}
    assert len(set(started)) == 3


def test_what_a_thread_raises_ends_the_load() -> None:
    def read(name: str, sources: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        list(prefetched(read, {"a": [], "b": [], "c": []}, 2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("omni_grpc-weights")]


@pytest.mark.parametrize(("threads", "reading"), [(1, 1), (4, 8), (16, 16)])
def test_what_goes_to_the_host_is_read_by_as_many(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int, reading: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(checkpoint.Reading, "run", lambda self, threads: asked.append(threads))
    with torch.device("meta"):
        module = QwenImageTransformer.from_config(json.loads((folder / "config.json").read_text()))
    load_weights(module, folder, TRANSFORMER_WEIGHTS, device="cpu", dtype=torch.float32, threads=threads)
    assert asked == [reading]
