"""What a build of the op library says when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

from .source import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one C++ file, which does not compile."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "omni_grpc").mkdir()
    (tmp_path / "omni_grpc" / "types").mkdir()
    for file in ("types/__init__.py", "types/version.py"):
        shutil.copy(ROOT / "omni_grpc" / file, tmp_path / "omni_grpc" / file)
    (tmp_path / "csrc" / "host").mkdir(parents=True)
    (tmp_path / "csrc" / "host" / "planted.cpp").write_text("int broken( {\n", encoding="utf-8")
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "OMNI_GRPC_BUILD")}
    return subprocess.run(
        command, cwd=tree, env=inherited | environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_build_that_fails_says_the_first_error_the_log_and_how_to_go_on(tree: Path) -> None:
    done = build(tree, OMNI_GRPC_BUILD="cpu")
    assert done.returncode == 1
    first, log, way_on = done.stderr.splitlines()[-3:]
    assert "the op library does not build: " in first
    assert "csrc/host/planted.cpp:1" in first
    assert "error: " in first
    assert "planted.cpp" in Path(log.rpartition(" ")[2]).read_text(encoding="utf-8")
    assert "OMNI_GRPC_BUILD=none make setup" in way_on
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("false") is None, reason="no program called false")
def test_a_compiler_that_does_not_run_is_named(tree: Path) -> None:
    done = build(tree, OMNI_GRPC_BUILD="cpu", CXX="false")
    assert done.returncode == 1
    assert "the op library does not build: " in done.stderr
    assert "'false'" in done.stderr


def test_going_on_without_the_library_leaves_no_old_one_behind(tree: Path) -> None:
    old = tree / "omni_grpc" / "_native.so"
    old.write_bytes(b"of other sources")
    done = build(tree, OMNI_GRPC_BUILD="none")
    assert done.returncode == 0, done.stderr
    assert not old.exists()


def test_setup_shows_these_lines_and_not_all_that_pip_prints() -> None:
    printed = """error: subprocess-exited-with-error
      [40 lines of output]
      omni_grpc: the op library does not build: csrc/host/a.cpp:1:2: error: no
      omni_grpc: the log of the build is build/native/build.log
      omni_grpc: to go on without the library: OMNI_GRPC_BUILD=none make setup
      [end of output]
"""
    assert setup_env.native_failure(printed).splitlines() == [
        "the op library does not build: csrc/host/a.cpp:1:2: error: no",
        "setup: the log of the build is build/native/build.log",
        "setup: to go on without the library: OMNI_GRPC_BUILD=none make setup",
    ]
    assert setup_env.native_failure("ERROR: No space left on device") == ""
