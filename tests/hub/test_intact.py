"""Files that are not what their name says are refused before a worker starts: by name, with the cause and the fix."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from omni_grpc.checkpoint.intact import fault
from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.loading.adapters import read_adapter
from omni_grpc.loading.convert import convert
from omni_grpc.types.errors import CheckpointError, ConfigError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4967215360\n"


def opened(model):
    return open_model(EngineConfig.from_settings(model=str(model)).model, apply=lambda found: found)


@pytest.fixture
def folder(tiny_qwen_image, tmp_path):
    return shutil.copytree(tiny_qwen_image, tmp_path / "tiny")


@pytest.mark.parametrize(
    "name",
    [
        "text_encoder/model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer/tokenizer.json",
        "vae/config.json",
        "model_index.json",
    ],
)
def test_a_git_lfs_pointer_is_named_with_the_fix(name, folder):
    (folder / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}.* is a git-lfs pointer .*run `git lfs pull`") as caught:
        opened(folder)
    assert caught.value.reason == "FILE_DAMAGED"
    if "/" in name:
        assert f"component '{name.partition('/')[0]}'" in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 20, -1])
@pytest.mark.parametrize("component", ["text_encoder/model", "transformer/diffusion_pytorch_model"])
def test_a_file_that_ends_early_is_named_with_the_fix(component, kept, folder):
    file = folder / f"{component}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    named = rf"{component}\.safetensors .component '{component.partition('/')[0]}'. ends early: .*download it again"
    with pytest.raises(CheckpointError, match=named) as caught:
        opened(folder)
    assert caught.value.reason == "FILE_DAMAGED"
    file.write_bytes(whole)
    assert opened(folder).path == folder


def test_all_damaged_files_are_named_at_once(folder):
    names = ("text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors")
    for name in names:
        (folder / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert all(name in str(caught.value) for name in names)


def test_a_shard_that_ends_early_is_named(folder, tmp_path):
    whole = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors = list(safetensors.torch.load_file(whole).items())
    shards = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = (dict(tensors[::2]), dict(tensors[1::2]))
    for shard, part in zip(shards, parts, strict=True):
        safetensors.torch.save_file(part, whole.with_name(shard))
    weight_map = {key: shard for shard, part in zip(shards, parts, strict=True) for key in part}
    whole.with_name(f"{whole.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole.unlink()
    opened(folder)
    second = whole.with_name(shards[1])
    second.write_bytes(second.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{shards[1]} .component 'transformer'. ends early"):
        opened(folder)


def test_pointers_in_place_of_adapters_and_pickles_are_named_too(folder, tmp_path):
    adapter = tmp_path / "style.safetensors"
    adapter.write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"style\.safetensors is a git-lfs pointer") as caught:
        read_adapter("style", adapter)
    assert caught.value.reason == "BAD_LORA"
    (folder / "vae/diffusion_pytorch_model.safetensors").unlink()
    (folder / "vae/diffusion_pytorch_model.bin").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin is a git-lfs pointer"):
        convert(folder, tmp_path / "out")


def test_a_whole_file_has_no_fault(tmp_path):
    for tensors in ({}, {"a": torch.zeros(3)}):
        safetensors.torch.save_file(tensors, file := tmp_path / "a.safetensors")
        assert fault(file) == ""
