"""The files of this checkout that the house rules look at."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("omni_grpc", "models")
PYTHON = (*PACKAGES, "tools", "tests", "benchmarks", "examples")
NATIVE_SUFFIXES = {".cu", ".cuh", ".cpp", ".h"}
WEB_SUFFIXES = {".ts", ".tsx", ".css", ".mjs"}
GENERATED = Path("omni_grpc/v1")


def python_files(*folders: str) -> Iterator[Path]:
    """Hand-written Python below `folders`, relative to the root; omni_grpc/models is seen once, as `models`."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if not relative.is_relative_to(GENERATED) and not relative.is_relative_to("omni_grpc/models"):
                yield relative


def native_files() -> Iterator[Path]:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in NATIVE_SUFFIXES:
            yield path.relative_to(ROOT)


def web_files() -> Iterator[Path]:
    """Hand-written sources of the page. Biome holds their functions to the same length (`make web-check`)."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", "clients/web").splitlines():
        path = Path(name)
        if path.suffix in WEB_SUFFIXES and not path.is_relative_to("clients/web/src/gen") and (ROOT / path).is_file():
            yield path


def text_files() -> Iterator[Path]:
    """Everything that is committed or would be, outside of tests and generated code, and is text."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        path = Path(name)
        if path.is_relative_to("tests") or path.is_relative_to(GENERATED) or not (ROOT / path).is_file():
            continue
        if b"\0" not in (ROOT / path).read_bytes():
            yield path


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def git(*arguments: str) -> str:
    """What git prints for this checkout. Skips the test where the files came without one."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", "core.quotePath=false", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
