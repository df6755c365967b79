"""The table of needed files, on names alone."""

import json

import pytest

from omni_grpc.checkpoint import layout
from omni_grpc.types.errors import CheckpointError

INDEX = {"_class_name": "P", "unet": ["diffusers", "UNet"], "text": ["transformers", "CLIPTextModel"], "bits": [1, 2]}
WEIGHTLESS = (
    *("CLIPTokenizer", "T5TokenizerFast", "TokenizersBackend", "CLIPImageProcessor", "Qwen2VLImageProcessorFast"),
    *("Qwen2VLProcessor", "ClapFeatureExtractor", "EulerDiscreteScheduler", "AdaptiveProjectedMixGuidance"),
)
SHARDED = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00001.safetensors"}}


def chosen(*files, content=SHARDED):
    """The weight files taken of a unet, beside a complete text encoder."""
    every = {*(f"unet/{file}" for file in files), "text/model.safetensors"}
    unet, text = layout.weights(INDEX, every, "here", lambda path: content)
    assert text.files == ("text/model.safetensors",)
    return [file.removeprefix("unet/") for file in unet.files], dict(unet.renamed)


@pytest.mark.parametrize(
    ("files", "taken", "renamed"),
    [
        (("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"), 1, False),
        (("diffusion_pytorch_model.fp16.safetensors",), 1, True),
        (("diffusion_pytorch_model.bf16.safetensors", "diffusion_pytorch_model.fp16.safetensors"), 1, True),
        (
            (
                "diffusion_pytorch_model.safetensors.index.json",
                "diffusion_pytorch_model-00001-of-00001.safetensors",
                "diffusion_pytorch_model-00001-of-00002.safetensors",
            ),
            2,
            False,
        ),
        (("model.safetensors", "pytorch_model.bin", "openvino_model.bin", "model.onnx"), 1, False),
    ],
)
def test_the_first_names_are_taken(files, taken, renamed):
    names, aliases = chosen(*files)
    assert names == list(files[:taken])
    assert aliases == ({"unet/diffusion_pytorch_model.safetensors": f"unet/{files[0]}"} if renamed else {})


@pytest.mark.parametrize(
    ("files", "reason", "words"),
    [
        (("diffusion_pytorch_model.bin",), "UNSAFE_WEIGHTS", "unet: diffusion_pytorch_model.bin"),
        (("sd.ckpt",), "UNSAFE_WEIGHTS", "unet: sd.ckpt"),
        (("weights.pt", "config.json"), "UNSAFE_WEIGHTS", "unet: weights.pt"),
        (("model.onnx", "flax_model.msgpack"), "WEIGHTS_MISSING", "unet: flax_model.msgpack, model.onnx"),
        ((), "WEIGHTS_MISSING", "unet: nothing"),
        (("diffusion_pytorch_model.safetensors.index.json",), "WEIGHTS_MISSING", "shards that do not exist"),
    ],
)
def test_what_cannot_be_loaded_is_named(files, reason, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        chosen(*files)
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "a\\b", ".."])
def test_a_shard_lies_beside_its_index(name):
    with pytest.raises(CheckpointError):
        chosen("diffusion_pytorch_model.safetensors.index.json", content={"weight_map": {"a": name}})


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none_is_refused(content):
    with pytest.raises(CheckpointError, match="not an index of weight shards"):
        chosen("diffusion_pytorch_model.safetensors.index.json", content=content)


@pytest.mark.parametrize("kind", WEIGHTLESS)
def test_a_component_without_weights_needs_none(kind):
    assert layout.weights({"part": ["transformers", kind]}, [], "here", json.loads) == []


def test_texts_are_what_lies_right_in_the_folders_of_components():
    files = ["model_index.json", "README.md", "x.json", "unet/config.json", "unet/model.py", "unet/deep/a.json"]
    files += ["text/vocab.txt", "text/spiece.model", "text/model.safetensors.index.fp16.json", "other/config.json"]
    assert layout.texts(INDEX, files, "here") == [
        "model_index.json",
        "unet/config.json",
        "text/spiece.model",
        "text/vocab.txt",
    ]
    assert layout.texts(INDEX, ["omni_grpc.json", *files], "here")[:2] == ["model_index.json", "omni_grpc.json"]
    with pytest.raises(CheckpointError, match="no config for component 'text'"):
        layout.texts(INDEX, files[:4], "here")
