"""Runs CUDA kernels under compute-sanitizer: memory, races in shared memory, barriers, reads of what nobody wrote.

    python tools/sanitize.py            compile tools/sanitize.cu with all kernels and run it, on a GPU machine
    python tools/sanitize.py --build    compile only: build/sanitize, for a machine without a compiler

Needs nvcc, CUTLASS, ninja and compute-sanitizer, no torch. The exit code is 1 where a tool finds something.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import provenance
from setup import (
    ROOT,
    compile_kernels,
    cuda_archs,
    find_cuda,
    kernel_commands,
    missing_cutlass,
    nvcc_command,
    put_ninja_on_path,
)

PROGRAM = ROOT / "build" / "sanitize"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def main() -> int:
    parser = argparse.ArgumentParser(description="run the CUDA kernels under compute-sanitizer", allow_abbrev=False)
    parser.add_argument("--build", action="store_true", help="compile only")
    options = parser.parse_args()
    if options.build or not PROGRAM.is_file():
        build()
    if options.build:
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    print(provenance.text("tools/sanitize.py"), flush=True)
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
    put_ninja_on_path()
    archs = cuda_archs()
    if missing := missing_cutlass(archs):
        raise SystemExit(f"sanitize: {missing}")
    commands = {source: [*command, "-lineinfo"] for source, command in kernel_commands(cuda, archs).items()}
    kernels = compile_kernels(commands, PROGRAM.with_name("sanitize-kernels"))
    program = ROOT / "tools" / "sanitize.cu"
    command = nvcc_command(cuda, program, archs, None)
    assert command is not None, "it is for every architecture"
    subprocess.run([*command, str(program), *kernels, "-o", str(PROGRAM)], check=True)


if __name__ == "__main__":
    sys.exit(main())
