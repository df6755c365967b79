"""A cache of torch that cannot be written is told, and keeps nothing from loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_grpc.ops import compile_cache
from omni_grpc.types.errors import ConfigError

NOWHERE = "/proc/none"
"""Nobody can make this folder, root neither."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_folder_that_can_be_written_is_left_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compile_cache.VARIABLE, str(temporary / "mine"))
    compile_cache.ensure()
    assert os.environ[compile_cache.VARIABLE] == str(temporary / "mine")
    monkeypatch.delenv(compile_cache.VARIABLE)
    compile_cache.ensure()
    assert compile_cache.VARIABLE not in os.environ
    assert caplog.messages == []


def test_another_folder_is_taken_and_told(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compile_cache.VARIABLE, NOWHERE)
    compile_cache.ensure()
    other = temporary / f"omni_grpc-{os.getuid()}" / "torchinductor"
    assert os.environ[compile_cache.VARIABLE] == str(other)
    assert other.is_dir()
    assert other.parent.stat().st_mode & 0o777 == 0o700, "its code is run, so nobody else may write there"
    (message,) = caplog.messages
    why = "there is no such file or folder"
    assert message.startswith(f"TORCHINDUCTOR_CACHE_DIR is {NOWHERE}, which cannot be written ({why})")


def test_a_folder_of_another_user_is_not_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_cache.VARIABLE, NOWHERE)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(
        ConfigError, match=r"it belongs to another user.*set TORCHINDUCTOR_CACHE_DIR or TMPDIR"
    ) as caught:
        compile_cache.ensure()
    assert caught.value.reason == "CACHE_NOT_WRITABLE"


def test_the_ops_load_without_any_cache() -> None:
    """Every variable that names one, at a folder that cannot be made."""
    names = (
        *("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    )
    code = "import omni_grpc.ops, omni_grpc.worker.process, omni_grpc.adapter.runner, torch._dynamo; print('loaded')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | dict.fromkeys(names, NOWHERE), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
    assert "TORCHINDUCTOR_CACHE_DIR is /proc/none, which cannot be written" in done.stderr
