"""A LoRA adapter of the hub: one file with its config, at a commit that is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_single_file import ask

pytestmark = pytest.mark.service

FILES = {
    "adapter_model.safetensors": b"weights",
    "adapter_config.json": b"{}",
    "optimizer.bin": b"pickle",
    "README.md": b"#",
    "more/second.safetensors": b"second",
}


def call(revision: str = "", filename: str = "", repo: str = "tiny-org/lora") -> str:
    return f'"|".join(map(str, hub.fetch_adapter("{repo}", "{revision}", "{filename}")))'


def test_a_file_comes_with_its_config_alone_and_again_without_the_hub(hub, environment):
    hub.add("tiny-org/lora", FILES)
    path, _, commit = ask(environment, call())["path"].partition("|")
    folder = Path(path).parent
    assert Path(path).read_bytes() == b"weights"
    assert sorted(one.name for one in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert len(commit) == 40
    again = ask(environment, call(commit, "adapter_model.safetensors"), HF_HUB_OFFLINE="1")
    assert again == {"path": f"{path}|{commit}"}
    second = ask(environment, call(filename="more/second.safetensors"))["path"].partition("|")[0]
    assert Path(second).read_bytes() == b"second"


@pytest.mark.parametrize(
    ("asked", "reason", "message"),
    [
        (call(filename="none.safetensors"), "INVALID_ARGUMENT", "is not in tiny-org/lora"),
        (call(filename="optimizer.bin"), "INVALID_ARGUMENT", "only .safetensors files are read"),
        (call(repo="tiny-org/pickled"), "INVALID_ARGUMENT", "only pickled weights"),
        (call(repo="tiny-org/two"), "INVALID_ARGUMENT", "a.safetensors, b.safetensors"),
        (call("other"), "REVISION_NOT_FOUND", "no revision 'other'"),
        (call(repo="tiny-org/none"), "MODEL_NOT_FOUND", "tiny-org/none"),
    ],
)
def test_what_is_not_there_is_told_and_nothing_is_downloaded(hub, environment, asked, reason, message):
    hub.add("tiny-org/lora", FILES)
    hub.add("tiny-org/pickled", {"pytorch_lora_weights.bin": b"pickle"})
    hub.add("tiny-org/two", {"a.safetensors": b"a", "b.safetensors": b"b"})
    told = ask(environment, asked)
    assert told["reason"] == reason
    assert message in told["message"]
    assert not [file for what, kind, file in hub.requests if kind != "info"]
