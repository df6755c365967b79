"""Components from transformers and diffusers: what they become, and how a broken one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.loading.components import load_module, load_tokenizer
from omni_grpc.types.errors import CheckpointError


@pytest.fixture
def folder(tiny_qwen_image: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return Path(shutil.copytree(tiny_qwen_image, tmp_path / "copy"))


def load(folder: Path, component: str, **options: str) -> torch.nn.Module:
    return load_module(open_checkpoint(folder), component, device="cpu", dtype=torch.float32, **options)


@pytest.mark.parametrize(("component", "options"), [("vae", {}), ("text_encoder", {"part": "model.language_model"})])
def test_weights_have_memory_of_their_own_and_no_gradients(folder: Path, component: str, options: dict) -> None:
    module = load(folder, component, **options)
    assert not module.training
    for parameter in module.parameters():
        assert parameter.data_ptr() % 64 == 0
        assert not parameter.requires_grad


def test_a_part_is_kept_alone(folder: Path) -> None:
    part = load(folder, "text_encoder", part="model.language_model")
    names = {name.split(".")[0] for name, _ in part.named_parameters()}
    assert names == {"embed_tokens", "layers", "norm"}


def test_missing_weights_are_named(folder: Path) -> None:
    for component, file, name in (
        ("vae", "diffusion_pytorch_model.safetensors", "decoder.conv_in.bias"),
        ("text_encoder", "model.safetensors", "model.norm.weight"),
    ):
        weights = safetensors.torch.load_file(folder / component / file)
        stored = next(key for key in weights if key.endswith(name.removeprefix("model.")))
        del weights[stored]
        safetensors.torch.save_file(weights, folder / component / file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=name.removeprefix("model.")) as caught:
            load(folder, component)
        assert repr(component) in str(caught.value)


def test_a_component_without_files_is_refused(folder: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="component 'vae'"):
        load(folder, "vae")


@pytest.mark.parametrize(
    ("entry", "message"),
    [(["diffusers", "NoSuchVae"], "has no 'NoSuchVae'"), (["somewhere", "Vae"], "library 'somewhere'")],
)
def test_a_class_that_is_not_known_is_refused(folder: Path, entry: list[str], message: str) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": entry}))
    with pytest.raises(CheckpointError, match=message):
        load(folder, "vae")


def test_the_tokenizer_is_the_one_of_the_checkpoint(folder: Path) -> None:
    tokens = load_tokenizer(open_checkpoint(folder), "tokenizer")("a red cat<|im_end|>").input_ids
    assert len(tokens) == 4
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="component 'tokenizer'"):
        load_tokenizer(open_checkpoint(folder), "tokenizer")


def test_no_progress_bar_is_drawn_and_the_callers_setting_stays(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.enable_progress_bar()
    load(folder, "text_encoder")
    assert "Loading" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled()
