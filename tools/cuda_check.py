"""Compiles every CUDA kernel with nvcc and CUTLASS and nothing else: no GPU, no torch. `make cuda-check` runs it.

Fails where either is missing, where a kernel does not compile or warns, and where one spills registers to local memory.
As many compilers run as setup.py would let run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup import (
    ROOT,
    cutlass_requirement,
    find_cuda,
    find_cutlass,
    kernel_sources,
    max_jobs,
    needs_cutlass,
    nvcc_command,
)

ARCHS = ("90a",)
STRICT = ("-Werror", "all-warnings", "-Xptxas", "-v")


def main() -> int:
    cuda = find_cuda()
    if cuda is None:
        print("cuda-check: no nvcc (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)", file=sys.stderr)
        return 1
    cutlass = find_cutlass()
    if cutlass is None:
        print(f"cuda-check: no CUTLASS; pip install --no-deps {cutlass_requirement()}", file=sys.stderr)
        return 1
    archs = tuple(os.environ["OMNI_GRPC_CUDA_ARCHS"].split(",")) if "OMNI_GRPC_CUDA_ARCHS" in os.environ else ARCHS
    commands = {source: nvcc_command(cuda, source, archs, cutlass) for source in kernel_sources()}
    wanted = [(source, [*command, *STRICT]) for source, command in commands.items() if command is not None]
    # the slow ones first, so that none is left alone at the end
    wanted.sort(key=lambda pair: not needs_cutlass(pair[0]))
    with ThreadPoolExecutor(max_jobs()) as pool:
        passed = sum(pool.map(lambda pair: compiles(*pair), wanted))
    print(f"cuda-check: {passed} of {len(wanted)} files compile for {archs}")
    return 0 if passed == len(wanted) else 1


def compiles(source: Path, command: list[str]) -> bool:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder, "out.o"))
        done = subprocess.run([*command, "-c", str(source), "-o", made], capture_output=True, text=True, check=False)
    name, report = source.relative_to(ROOT), done.stdout + done.stderr
    if done.returncode:
        print(f"{name}: does not compile\n{report}")
        return False
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    spilled = [line.strip() for line in report.splitlines() if re.search(r"[1-9]\d* bytes spill", line)]
    kernels = f"{len(registers)} kernels of up to {max(registers, default=0)} registers"
    print(f"{name}: {kernels}, {time.monotonic() - start:.1f} s" + (f"; spills: {spilled[0]}" if spilled else ""))
    return not spilled


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    sys.exit(main())
