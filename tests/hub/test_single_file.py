"""A file that stands in for the weights of a component: it is fetched, and those are not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .conftest import NEEDED, ROOT

pytestmark = pytest.mark.service

ASK = """
import json, sys
from omni_grpc.checkpoint import hub
from omni_grpc.types.errors import OmniError
try:
    print(json.dumps({"path": str(eval(sys.argv[1]))}))
except OmniError as error:
    print(json.dumps({"reason": error.reason, "message": str(error)}))
"""
FETCH = 'hub.fetch("tiny-org/tiny", look=lambda folder: ["transformer"])'
FILE = 'hub.fetch_file("tiny-org/packed", "q/tiny-Q4_K.gguf")'


def ask(environment: dict[str, str], call: str, **variables: str) -> dict[str, Any]:
    command = [sys.executable, "-c", ASK, call]
    done = subprocess.run(
        command, env=environment | variables, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return dict(json.loads(done.stdout))


def test_weights_that_are_replaced_are_not_downloaded(hub, environment):
    hub.add("tiny-org/tiny", NEEDED)
    path = ask(environment, FETCH)["path"]
    loaded = {file for what, kind, file in hub.requests if kind != "info" and ".safetensors" in file}
    assert any("vae" in file for file in loaded)
    assert not any("transformer" in file and not file.endswith(".index.json") for file in loaded)
    assert ask(environment, FETCH, HF_HUB_OFFLINE="1") == {"path": path}
    whole = ask(environment, 'hub.fetch("tiny-org/tiny")', HF_HUB_OFFLINE="1")
    assert whole["reason"] == "HUB_OFFLINE"
    assert "transformer" in whole["message"]


def test_a_file_is_fetched_once_or_its_absence_told(hub, environment):
    hub.add("tiny-org/packed", {"q/tiny-Q4_K.gguf": b"GGUF" * 100})
    absent = ask(environment, FILE, HF_HUB_OFFLINE="1")
    assert absent["reason"] == "HUB_OFFLINE"
    assert "hf download tiny-org/packed q/tiny-Q4_K.gguf" in absent["message"]
    path = ask(environment, FILE)["path"]
    with open(path, "rb") as file:
        assert file.read() == b"GGUF" * 100
    assert ask(environment, FILE, HF_HUB_OFFLINE="1") == {"path": path}
    other = ask(environment, 'hub.fetch_file("tiny-org/packed", "other.gguf")')
    assert other["reason"] == "MODEL_NOT_FOUND"
    assert "tiny-org/packed:other.gguf: the file does not exist" in other["message"]
