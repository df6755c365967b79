"""Pickled weights become safetensors, bit for bit, and a pickle that is more than weights is left alone."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.loading.convert import convert, main, new_name
from omni_grpc.loading.loader import Loader
from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.types.errors import CheckpointError

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "text_encoder/model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"


class Payload:
    """Pickles as a call of os.mkdir."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def pickled(tiny_qwen_image, tmp_path):
    """The tiny checkpoint as it was saved before safetensors: one file, shards, and the format before zip files."""
    folder = shutil.copytree(tiny_qwen_image, tmp_path / "pickled")
    torch.save(take(folder / TEXT_ENCODER), folder / "text_encoder/pytorch_model.bin")
    legacy = folder / "vae/diffusion_pytorch_model.bin"
    torch.save(take(folder / VAE), legacy, _use_new_zipfile_serialization=False)
    weights = take(folder / TRANSFORMER)
    names = sorted(weights)
    shards = {"1": names[: len(names) // 2], "2": names[len(names) // 2 :]}
    for number, keys in shards.items():
        torch.save({key: weights[key] for key in keys}, folder / shard(number))
    weight_map = {key: Path(shard(number)).name for number, keys in shards.items() for key in keys}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "transformer/diffusion_pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def shard(number):
    return f"transformer/diffusion_pytorch_model-0000{number}-of-00002.bin"


def take(path):
    tensors = safetensors.torch.load_file(path)
    path.unlink()
    return tensors


def small(folder, content):
    """A checkpoint of one component, whose weights are a pickle of `content`."""
    (folder / "vae").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"vae": ["diffusers", "AutoencoderKL"]}', encoding="utf-8")
    torch.save(content, folder / "vae/diffusion_pytorch_model.bin")
    return folder


def test_a_checkpoint_comes_back_bit_equal_and_loads(pickled, tiny_qwen_image, tmp_path):
    made = convert(pickled, tmp_path / "out")
    assert len(made) == 4
    expected = {p.relative_to(tiny_qwen_image).as_posix(): p for p in tiny_qwen_image.rglob("*") if p.is_file()}
    found = {p.relative_to(tmp_path / "out").as_posix(): p for p in (tmp_path / "out").rglob("*") if p.is_file()}
    parts = {f"{shard(n).removesuffix('.bin')}.safetensors" for n in "12"}
    assert found.keys() == expected.keys() - {TRANSFORMER} | parts | {TRANSFORMER + ".index.json"}
    for name in found.keys() & expected.keys() - {TEXT_ENCODER, VAE}:
        assert found[name].read_bytes() == expected[name].read_bytes()
    for name in (TEXT_ENCODER, VAE):
        assert_equal(safetensors.torch.load_file(found[name]), safetensors.torch.load_file(expected[name]))
    index = json.loads(found[TRANSFORMER + ".index.json"].read_text(encoding="utf-8"))
    loaded = [(name, safetensors.torch.load_file(found[name])) for name in sorted(parts)]
    assert index["weight_map"] == {key: Path(name).name for name, tensors in loaded for key in tensors}
    merged = {key: tensor for _, tensors in loaded for key, tensor in tensors.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in merged.values())
    assert_equal(merged, safetensors.torch.load_file(expected[TRANSFORMER]))
    checkpoint = open_model(EngineConfig.from_settings(model=str(tmp_path / "out")).model, apply=lambda found: found)
    QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.float32))
    with pytest.raises(CheckpointError, match="only pickled weights"):
        open_model(EngineConfig.from_settings(model=str(pickled)).model, apply=lambda found: found)


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[key].dtype, expected[key].shape)
        assert torch.equal(tensor, expected[key])


def test_dtypes_views_shared_and_odd_tensors_keep_their_bits(tmp_path):
    table = torch.randn(6, 4)
    content = {
        "bf16": torch.randn(3).bfloat16(),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "flag": torch.tensor([True, False]),
        "long": torch.tensor(1 << 40),
        "empty": torch.empty(0, 3),
        "embed": table,
        "head": table,
        "transposed": table.T,
        "slice": table[2:4],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    convert(small(tmp_path / "in", content), tmp_path / "out")
    written = safetensors.torch.load_file(tmp_path / "out/vae/diffusion_pytorch_model.safetensors")
    assert written.keys() == content.keys()
    for key, tensor in content.items():
        assert (written[key].dtype, written[key].shape) == (tensor.dtype, tensor.shape)
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (written[key], tensor)]
        assert torch.equal(*raw), key


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path, capsys):
    trap = tmp_path / "trap"
    source = small(tmp_path / "in", {"weight": torch.ones(2), "payload": Payload(str(trap))})
    assert main([str(source), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "UNSAFE_PICKLE" in message
    assert "mkdir" in message
    assert "weights_only" not in message
    assert not trap.exists()
    (source / "vae/diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Payload(str(trap))))
    assert main([str(source), str(tmp_path / "out")]) == 2
    assert not trap.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "contains a list, expected named tensors"),
        ({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, "more than named dense tensors: state_dict, epoch"),
        ({"a": torch.eye(2).to_sparse()}, "more than named dense tensors: a"),
        ({}, "expected named tensors"),
    ],
)
def test_what_is_not_tensors_by_name_is_refused(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        convert(small(tmp_path / "in", content), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_told_in_words(tmp_path, capsys):
    source = small(tmp_path / "in", {"w": torch.zeros(2)})
    (tmp_path / "file").touch()
    assert main([str(source), str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr().err
    assert "error: FILE_NOT_WRITTEN: " in said
    assert "a part of the path is a file and not a folder" in said
    assert "Errno" not in said


def test_a_file_that_is_no_pickle_is_refused(tmp_path):
    source = small(tmp_path / "in", {"a": torch.ones(2)})
    weights = source / "vae/diffusion_pytorch_model.bin"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin"):
        convert(source, tmp_path / "out")
    weights.rename(weights.with_name("best.ckpt"))
    with pytest.raises(CheckpointError, match=r"best\.ckpt has a pickle's extension"):
        convert(source, tmp_path / "out")


def test_an_index_that_does_not_fit_its_shards_is_refused(pickled, tmp_path):
    (pickled / shard("2")).unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        convert(pickled, tmp_path / "out")
    torch.save({"stranger": torch.ones(1)}, pickled / shard("2"))
    with pytest.raises(CheckpointError, match="weights that are not in their shards"):
        convert(pickled, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pickled"]


def test_there_must_be_something_to_convert_and_room_for_it(tiny_qwen_image, tmp_path):
    with pytest.raises(CheckpointError, match="no pickled weights to convert"):
        convert(tiny_qwen_image, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists; name a new folder"):
        convert(tiny_qwen_image, tmp_path)
    with pytest.raises(CheckpointError, match=r"no model_index\.json"):
        convert(tmp_path, tmp_path / "out")


def test_a_pickle_beside_its_safetensors_is_left_out(tiny_qwen_image, tmp_path):
    source = shutil.copytree(tiny_qwen_image, tmp_path / "in")
    torch.save(take(source / VAE), source / "vae/diffusion_pytorch_model.bin")
    (source / "text_encoder/pytorch_model.bin").write_bytes(b"never read")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / TEXT_ENCODER).read_bytes() == (source / TEXT_ENCODER).read_bytes()
    assert not list((tmp_path / "out").rglob("*.bin"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
        ("pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"),
        ("pytorch_model.bin.index.json", "model.safetensors.index.json"),
        ("diffusion_pytorch_model.fp16.bin", "diffusion_pytorch_model.fp16.safetensors"),
        ("diffusion_pytorch_model.fp16-00001-of-00002.bin", "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"),
        ("diffusion_pytorch_model.bin.index.fp16.json", "diffusion_pytorch_model.safetensors.index.fp16.json"),
        ("training_args.bin", None),
        ("config.json", None),
    ],
)
def test_names_are_those_that_the_libraries_look_for(old, new):
    assert new_name(old) == new


def test_the_command_converts(tmp_path):
    source = small(tmp_path / "in", {"a": torch.ones(2)})
    command = [sys.executable, "-m", "omni_grpc", "convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [
        "vae/diffusion_pytorch_model.safetensors: 1 tensors, 8 bytes, verified",
        str(tmp_path / "out"),
    ]
