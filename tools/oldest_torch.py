"""Compiles the bindings with the headers of the oldest torch that they are built with. `make oldest-torch` runs it.

One binary serves every torch, but it may be built where any of them is installed, and a name that only newer headers
have is not seen where those are. The headers come from torch's wheel, once; nothing of it is installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup import CSRC, CXX_FLAGS, ROOT, max_jobs

STANDARD = "c++17"
"""What that torch compiles extensions as; newer ones have a newer standard."""
# as if all kernels were there
KERNELS = ('-DOMNI_GRPC_CUDA_ARCHS="90a"', *(f"-DOMNI_GRPC_GEMM_SM{number}" for number in (80, 89, 90)))


def main() -> int:
    version = oldest()
    try:
        include = headers(version)
    except subprocess.CalledProcessError as error:
        # nothing that the sources could mend
        print(f"oldest-torch: SKIPPED, pip has no torch {version}: {error.stderr.strip()[-1000:]}", file=sys.stderr)
        return 0
    sources = sorted((CSRC / "bind").glob("*.cpp"))
    with ThreadPoolExecutor(max_jobs()) as pool:
        failures = [failure for failure in pool.map(lambda source: compiled(source, include), sources) if failure]
    print(*failures, sep="\n")
    passed = len(sources) - len(failures)
    print(f"oldest-torch: {passed} of {len(sources)} files compile with the headers of torch {version}")
    return 1 if failures else 0


def oldest() -> str:
    """By pyproject.toml: 2.11.0 of torch>=2.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = (named for named in project["dependencies"] if re.match(r"torch\b", named))
    found = re.search(r">=(\d+\.\d+)", requirement)
    assert found, requirement
    return f"{found[1]}.0"


def headers(version: str) -> Path:
    """The folder that `#include <torch/...>` is looked up in, kept under build/."""
    kept = ROOT / "build" / f"torch-{version}"
    if not kept.is_dir():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", folder, f"torch=={version}"]
            subprocess.run(pip, check=True, capture_output=True, text=True)
            (wheel,) = Path(folder).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if name.startswith("torch/include/")]
                archive.extractall(Path(folder, "whole"), wanted)
            shutil.move(Path(folder, "whole", "torch", "include"), kept)
    return kept


def compiled(source: Path, include: Path) -> str:
    """What the compiler says where it fails."""
    folders = (include, include / "torch" / "csrc" / "api" / "include")
    command = ["c++", "-fsyntax-only", f"-std={STANDARD}", *CXX_FLAGS, *KERNELS, "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [*(f"-isystem{folder}" for folder in folders), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{source.relative_to(ROOT)}: {done.stderr[:2000]}" if done.returncode else ""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    sys.exit(main())
