"""Tests the CPU kernels as narrower processors run them. `make cpu-clones` runs it.

The library has each kernel three times and takes the widest that the processor runs, so the others are never called
where AVX-512 is. This builds a library with one of them alone in a copy of the tree, sees that it has no wider
instructions, and runs the tests of the ops there. The exit code is 1 where one of them fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup import ROOT

WIDER = {256: "%zmm", 128: "%ymm"}
"""Bits of the widest vectors, AVX2's and SSE2's -> registers that are wider."""
COPIED = (
    "csrc",
    "omni_grpc",
    "tests",
    "benchmarks",
    "tools",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "clients/python/pyproject.toml",
)
TESTS = ("tests/ops", "-m", "not gpu", "-p", "no:cacheprovider")


def main() -> int:
    if platform.machine() != "x86_64":
        print("cpu-clones: other processors than x86-64 have no clones")
        return 0
    failed: list[int] = []
    for bits, registers in WIDER.items():
        if bits == 256 and "avx2" not in Path("/proc/cpuinfo").read_text():
            print("cpu-clones: 256 bits: skipped, this processor has no AVX2")
            continue
        with tempfile.TemporaryDirectory(prefix="cpu-clones-") as folder:
            tree = copy(Path(folder))
            problem = build(tree, bits) or wider(tree, registers) or test(tree)
        print(f"cpu-clones: {bits} bits: {problem or 'as it should'}", flush=True)
        failed += [bits] if problem else []
    return 1 if failed else 0


def copy(folder: Path) -> Path:
    """The tree without what was built in it."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("_native*.so", "__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


def build(tree: Path, bits: int) -> str:
    environment = {**os.environ, "OMNI_GRPC_BUILD": "cpu", "CFLAGS": f"-DOMNI_CPU_BITS={bits}"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return f"does not build: {done.stderr[-2000:]}" if done.returncode else ""


def wider(tree: Path, registers: str) -> str:
    """What is wrong with the instructions of the library."""
    library = tree / "omni_grpc" / "_native.so"
    listed = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return f"the library has instructions with {registers}" if registers in listed else ""


def test(tree: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=tree, check=False)
    return f"tests end with exit code {done.returncode}" if done.returncode else ""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    sys.exit(main())
