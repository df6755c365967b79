"""What --model may be, and a checkpoint that a server fetches and serves."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.loading.loader import Loader
from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.types.errors import CheckpointError, ConfigError

from .conftest import NEEDED, ROOT


def opened(model, **settings):
    return open_model(EngineConfig.from_settings(model=str(model), **settings).model, apply=lambda found: found)


@pytest.fixture
def folder(tiny_qwen_image, tmp_path):
    return shutil.copytree(tiny_qwen_image, tmp_path / "tiny")


def test_a_folder_is_opened_where_it_lies(tiny_qwen_image):
    checkpoint = opened(tiny_qwen_image)
    assert (checkpoint.path, checkpoint.name) == (tiny_qwen_image, "tiny-qwen-image")
    assert opened(tiny_qwen_image, served_model_name="mine").name == "mine"


def test_a_folder_has_no_revision(tiny_qwen_image):
    with pytest.raises(ConfigError, match="--revision is for a hub model"):
        opened(tiny_qwen_image, revision="main")


def test_a_folder_of_another_kind_is_refused_with_what_it_has(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no model_index\.json, only weights\.safetensors") as caught:
        opened(tmp_path)
    assert caught.value.reason == "NO_MODEL_INDEX"


def test_a_folder_that_is_not_there_is_no_hub_name():
    with pytest.raises(CheckpointError, match="does not exist"):
        opened("/no/such/folder")


def test_a_folder_with_pickles_is_refused_with_the_fix(folder):
    weights = folder / "vae/diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match=r"vae: diffusion_pytorch_model\.bin.*omni_grpc convert") as caught:
        opened(folder)
    assert caught.value.reason == "UNSAFE_WEIGHTS"


def test_a_folder_with_variants_alone_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    plain = folder / "transformer/diffusion_pytorch_model.safetensors"
    expected = safetensors.torch.load_file(plain)
    plain.rename(plain.with_suffix(".fp16.safetensors"))
    text = folder / "text_encoder/model.safetensors"
    text.rename(text.with_suffix(".fp16.safetensors"))
    checkpoint = opened(folder)
    assert checkpoint.name == "tiny"
    assert checkpoint.path == opened(folder).path != folder
    QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.float32))
    loaded = safetensors.torch.load_file(checkpoint.path / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_a_variant_is_loaded_where_the_home_cannot_be_written(folder, tmp_path, monkeypatch):
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.write_bytes(b"")  # a file, in which root cannot make a folder either
    temporary.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    plain = folder / "transformer/diffusion_pytorch_model.safetensors"
    plain.rename(plain.with_suffix(".fp16.safetensors"))
    checkpoint = opened(folder)
    assert checkpoint.path.is_relative_to(temporary / f"omni_grpc-{os.getuid()}")
    assert opened(folder).path == checkpoint.path
    QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.float32))
    # nowhere at all
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    with pytest.raises(CheckpointError, match=r"transformer/diffusion_pytorch_model\.fp16.*set HF_HOME or TMPDIR"):
        opened(folder)


@pytest.mark.service
@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_cache_that_cannot_be_written_is_told_with_the_variable_to_set(hub, environment, variable):
    """A folder that nobody can make, root neither."""
    hub.add("tiny-org/tiny", NEEDED)
    del environment["HF_HOME"]
    for command in (["pull", "tiny-org/tiny"], ["doctor", "--advise", "tiny-org/tiny"]):
        done = subprocess.run(
            [sys.executable, "-m", "omni_grpc", *command], cwd=ROOT, env=environment | {variable: "/proc/none"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: DOWNLOAD_FAILED: tiny-org/tiny cannot be kept in the cache /proc/none")
        assert line.endswith("/none: there is no such file or folder; set HF_HOME to a folder that can be written")


@pytest.mark.service
def test_advice_on_a_file_that_is_no_safetensors_file_is_one_line(hub, environment):
    hub.add("tiny-org/tiny", NEEDED)
    done = subprocess.run(
        [sys.executable, "-m", "omni_grpc", "doctor", "--advise", "tiny-org/tiny"], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: FILE_DAMAGED: tiny-org/tiny has a file that is no safetensors file: ")


@pytest.mark.service
def test_pull_prints_the_folder_or_the_error(hub, environment, tmp_path):
    hub.add("tiny-org/empty", {"config.json": b"{}"})
    command = [sys.executable, "-m", "omni_grpc", "pull", "tiny-org/empty"]
    refused = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: NO_MODEL_INDEX: tiny-org/empty (revision main) has no model_index.json")
    index = {"_class_name": "P", "scheduler": ["diffusers", "EulerDiscreteScheduler"]}
    hub.add(
        "tiny-org/small", {"model_index.json": json.dumps(index).encode(), "scheduler/scheduler_config.json": b"{}"}
    )
    pulled = subprocess.run(
        [*command[:-1], "tiny-org/small"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert sorted(os.listdir(pulled.stdout.strip())) == ["model_index.json", "scheduler"]
