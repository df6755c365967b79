"""A fake hub, and processes that fetch from it: huggingface_hub reads its environment once, when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .fake_hub import FakeHub

ROOT = Path(__file__).resolve().parents[2]
FETCH = """
import dataclasses, json, sys, types
import huggingface_hub.file_download as download
# it sleeps for a second before each new try, and nothing here tests that
download.time = types.SimpleNamespace(sleep=lambda seconds: None)
from omni_grpc.checkpoint import hub
from omni_grpc.types.errors import OmniError
answers = []
for revision in sys.argv[2:]:
    seen = []
    note = lambda transfer: seen.append(dataclasses.asdict(transfer))
    try:
        path = hub.fetch(sys.argv[1], revision=revision or None, progress=note)
        answers.append({"path": str(path), "progress": seen})
    except OmniError as error:
        answers.append({"reason": error.reason, "code": error.code, "message": str(error), "progress": seen})
print(json.dumps(answers))
"""
INDEX = {
    "_class_name": "TinyPipeline",
    "_diffusers_version": "0.42.1",
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "TinyTransformer"],
    "vae": ["diffusers", "AutoencoderKL"],
}
NEEDED = {
    "model_index.json": json.dumps(INDEX).encode(),
    "scheduler/scheduler_config.json": b"{}",
    "text_encoder/config.json": b'{"text": 1}',
    "text_encoder/model.safetensors": b"t" * 500,
    "tokenizer/merges.txt": b"a b",
    "tokenizer/tokenizer_config.json": b'{"tokens": 1}',
    "tokenizer/vocab.json": b'{"a": 1}',
    "transformer/config.json": b'{"width": 8}',
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": b"1" * 300,
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": b"2" * 200,
    "transformer/diffusion_pytorch_model.safetensors.index.json": json.dumps(
        {
            "weight_map": {
                "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
                "b": "diffusion_pytorch_model-00002-of-00002.safetensors",
            }
        }
    ).encode(),
    "vae/config.json": b'{"z": 4}',
    "vae/diffusion_pytorch_model.safetensors": b"v" * 400,
}
NOT_NEEDED = {
    ".gitattributes": b"",
    "README.md": b"# Tiny",
    "sample.png": b"png",
    "pipeline.py": b"raise SystemExit",
    "tiny.safetensors": b"whole" * 100,
    "tiny.ckpt": b"pickle",
    "safety_checker/model.safetensors": b"s" * 100,
    "text_encoder/flax_model.msgpack": b"flax",
    "text_encoder/model.fp16.safetensors": b"h" * 250,
    "text_encoder/model.onnx": b"onnx",
    "text_encoder/pytorch_model.bin": b"pickle",
    "transformer/diffusion_pytorch_model-00001-of-00003.safetensors": b"an older split",
    "transformer/diffusion_pytorch_model.bin.index.json": b"{}",
    "transformer/model.py": b"raise SystemExit",
    "vae/diffusion_pytorch_model.bin": b"pickle",
    "vae/deep/config.json": b"{}",
    "vae_1_0/diffusion_pytorch_model.safetensors": b"other",
}

Fetch = Callable[..., Any]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """What a process needs to see the fake hub, and a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OMNI_GRPC_"))}
    return kept | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a process that fetches a model and prints what came of it."""

    def start(repo: str, *revisions: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", FETCH, repo, *(revisions or ("",))],
            cwd=tmp_path,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def fetch(start: Callable[..., subprocess.Popen[str]]) -> Fetch:
    """hub.fetch in a process of its own: its path and progress, or the reason, code and message of its error. For
    several revisions, a list of that.
    """

    def fetch(repo: str, *revisions: str, **variables: str) -> Any:
        answers = answered(start(repo, *revisions, **variables))
        return answers if len(revisions) > 1 else answers[0]

    return fetch


def answered(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    return [{**answer, "log": log} for answer in json.loads(out.splitlines()[-1])]


def files_in(path: str) -> dict[str, bytes]:
    root = Path(path)
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}
