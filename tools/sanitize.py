"""Runs CUDA kernels under compute-sanitizer: memory, races in shared memory, barriers, reads of what nobody wrote.

    python tools/sanitize.py            compile tools/sanitize.cu with the kernels and run it, on a GPU machine
    python tools/sanitize.py --build    compile only: build/sanitize, for a machine without a compiler

Needs nvcc and compute-sanitizer, no torch. The exit code is 1 where a tool finds something.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup import DEFAULT_ARCHS, ROOT, find_cuda, nvcc_command, visible_archs

PROGRAM = ROOT / "build" / "sanitize"
FAMILIES = ("norm", "quant", "rope", "cache", "step", "image", "heads", "dequant")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def main() -> int:
    parser = argparse.ArgumentParser(description="run the CUDA kernels under compute-sanitizer")
    parser.add_argument("--build", action="store_true", help="compile only")
    options = parser.parse_args()
    if options.build or not PROGRAM.is_file():
        build()
    if options.build:
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    failed = []
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1", str(PROGRAM)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip("= ")]
        print(f"{tool}: exit code {done.returncode}; {'; '.join(lines[-2:])}", flush=True)
        failed += [tool] if done.returncode else []
    return 1 if failed else 0


def build() -> None:
    cuda = find_cuda()
    if cuda is None:
        raise SystemExit("sanitize: no nvcc (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)")
    kernels = [path for family in FAMILIES for path in sorted((ROOT / "csrc" / "kernels").glob(f"{family}*.cu"))]
    PROGRAM.parent.mkdir(exist_ok=True)
    program = ROOT / "tools" / "sanitize.cu"
    command = nvcc_command(cuda, program, visible_archs() or DEFAULT_ARCHS, None)
    assert command is not None, "it is for every architecture"
    subprocess.run([*command, "-lineinfo", str(program), *map(str, kernels), "-o", str(PROGRAM)], check=True)


if __name__ == "__main__":
    sys.exit(main())
