"""Files that are damaged in ways that libraries answer with errors of any kind: refused by name all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.checkpoint.intact import fault
from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.loading.adapters import read_adapter
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import CheckpointError, ConfigError
from omni_grpc.worker.build import build

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def copy(tiny_qwen_image: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen_image, tmp_path / "model"))


def load(folder: Path) -> None:
    config = EngineConfig.from_settings(model=str(folder), warm_up_seconds=0, cpu_threads=1)
    build(config, open_model(config.model, apply=lambda found: apply_settings(config, found)), "x", lambda told: None)


def with_header(path: Path, header: bytes) -> None:
    data = path.read_bytes()
    body = data[8 + int.from_bytes(data[:8], "little") :]
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


HEADERS = {
    "offsets of none": b'{"a":{"dtype":"F32","shape":[],"data_offsets":[]}}',
    "offsets beyond any": b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,1e999]}}',
    "nested too deep": b"[" * 100_000,
    "no object": b"[1]",
    "a string": b'"x"',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_say_nothing_are_refused_by_every_reader(header: bytes, copy: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "a.safetensors"
    adapter.write_bytes(bytes(8))
    with_header(adapter, header)
    assert fault(adapter) == ""
    with pytest.raises(ConfigError) as refused:
        read_adapter("a", adapter)
    assert refused.value.reason == "BAD_LORA"
    for part in ("transformer/diffusion_pytorch_model", "text_encoder/model", "vae/diffusion_pytorch_model"):
        path = copy / f"{part}.safetensors"
        whole = path.read_bytes()
        with_header(path, header)
        with pytest.raises(CheckpointError, match=r"text_encoder|transformer|vae"):
            load(copy)
        path.write_bytes(whole)


CONFIGS: dict[str, tuple[str, Change, str]] = {
    "no such setting": ("transformer/config.json", lambda config: config.pop("num_layers"), "num_layers"),
    "a setting of another type": (
        "transformer/config.json",
        lambda config: config.update(joint_attention_dim=[1]),
        "'transformer'",
    ),
    "a library's setting of another type": (
        "text_encoder/config.json",
        lambda config: config.update(text_config="x"),
        "'text_encoder'",
    ),
    "a tokenizer's": ("tokenizer/tokenizer_config.json", lambda config: config.update(unk_token={"x": 1}), "tokenizer"),
    "what the limits need": ("vae/config.json", lambda config: config.pop("dim_mult"), "dim_mult"),
    "more layers than time": (
        "vae/config.json",
        lambda config: config.update(num_res_blocks=1 << 40),
        "num_res_blocks",
    ),
    "no component": ("model_index.json", lambda config: config.pop("vae"), "vae"),
    "no denoiser": ("model_index.json", lambda config: config.pop("transformer"), "transformer"),
    "a class that is a number": ("model_index.json", lambda config: config.update(vae=["diffusers", 1.5]), "vae"),
}


@pytest.mark.parametrize(("file", "change", "named"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_describes_nothing_is_refused_by_name(file: str, change: Change, named: str, copy: Path) -> None:
    config = json.loads((copy / file).read_text())
    change(config)
    (copy / file).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=named):
        load(copy)


def test_a_config_that_is_nested_too_deep_is_no_json(copy: Path) -> None:
    (copy / "transformer" / "config.json").write_text('{"a":' * 50_000)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load(copy)
