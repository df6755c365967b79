"""Checks that every C++ and CUDA file of csrc/ includes what it uses. `make includes-check` runs it; it needs no GPU.

A file that gets a header only through another one compiles with one standard library and not with the next. Two checks
find that: clang-include-cleaner (a development dependency) compares the names in each file, headers too, with its own
`#include` lines; then clang compiles the C++ files with libc++, whose headers include less of each other than GCC's do.
A check whose tool is missing here is skipped, and a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup import CSRC, CXX_FLAGS, ROOT, find_cuda, find_cutlass

WARNINGS = ("-Wall", "-Werror")
LIBCXX = ("-stdlib=libc++", "-D_LIBCPP_REMOVE_TRANSITIVE_INCLUDES")
KERNELS = tuple(f"-DOMNI_GRPC_GEMM_SM{number}" for number in (80, 89, 90))
"""As if all kernels were there, so that the code that calls them is seen."""

NVCC = ("-D__CUDACC_VER_MAJOR__=13", "-D__CUDACC_VER_MINOR__=0", "-DCUTLASS_ARCH_MMA_SM90_SUPPORTED", "-DNDEBUG")
"""CUTLASS reads what a compiler can do from nvcc's version."""

PARTS = (
    (re.compile(r"torch/.*"), "bind.h"),
    (re.compile(r"(cutlass|cute)/.*"), ""),
    (re.compile(r"(driver_types|cuda_runtime_api|vector_types|\w+_functions|\w+_intrinsics)\.hp?p?"), "cuda_runtime.h"),
)
"""Headers that a library keeps to itself -> the one that a file includes for them; empty where any of them will do."""


def main(arguments: Sequence[str]) -> int:
    sources = [Path(name).resolve() for name in arguments] or native_sources()
    cuda = find_cuda()
    cleaner, compiler = find_cleaner(), find_clang()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as stub, ThreadPoolExecutor(os.cpu_count()) as pool:
        # clang's CUDA mode reads this header of cuRAND, which a slim toolkit lacks and no kernel here uses
        Path(stub, "curand_mtgp32_kernel.h").touch()
        if cleaner is None:
            print("includes-check: SKIPPED: no clang-include-cleaner (make setup installs it)")
        else:
            readable = [path for path in sources if is_readable(path, cuda)]
            failures += each(pool, readable, lambda path: wrong_includes(cleaner, path, flags(path, cuda, stub)))
            print(f"includes-check: compared the names in {len(readable)} files with their #include lines")
            if readable != sources:
                left = len(sources) - len(readable)
                print(f"includes-check: SKIPPED {left} CUDA files: no CUDA toolkit or no CUTLASS")
        if compiler is None:
            print("includes-check: SKIPPED the compilation with libc++: no clang++ with libc++ (tools/ci_packages.sh)")
        else:
            compiled = [path for path in sources if path.suffix == ".cpp"]
            failures += each(pool, compiled, lambda path: compile_errors(compiler, path, flags(path, cuda, stub)))
            print(f"includes-check: compiled {len(compiled)} files with {compiler} and libc++")
    print(*failures, sep="\n", end="\n" if failures else "")
    return 1 if failures else 0


def each(pool: ThreadPoolExecutor, sources: list[Path], check: Callable[[Path], list[str]]) -> Iterator[str]:
    for source, findings in zip(sources, pool.map(check, sources), strict=True):
        name = source.relative_to(ROOT) if source.is_relative_to(ROOT) else source
        yield from (f"{name}: {finding}" for finding in findings)


def native_sources() -> list[Path]:
    found = [path for path in CSRC.rglob("*") if path.suffix in {".cpp", ".h", ".cu", ".cuh"}]
    return [*sorted(found), ROOT / "tools" / "sanitize.cu"]


def is_cuda(source: Path) -> bool:
    return source.suffix in {".cu", ".cuh"}


def is_readable(source: Path, cuda: Path | None) -> bool:
    """False for a CUDA file whose own headers need a CUDA toolkit, or CUTLASS, that this machine lacks."""
    needs_cutlass = re.search(r'#include [<"](cutlass|cute|gemm_)', source.read_text(encoding="utf-8"))
    return not is_cuda(source) or (cuda is not None and (not needs_cutlass or find_cutlass() is not None))


def find_cleaner() -> str | None:
    """The one beside this interpreter, else the newest on PATH."""
    name = "clang-include-cleaner"
    return shutil.which(name, path=str(Path(sys.executable).parent)) or next(installed(name), None)


def find_clang() -> str | None:
    """A clang++ that finds libc++ 16 or newer, whose `<source_location>` older ones lack."""
    for compiler in installed("clang++"):
        command = [compiler, *LIBCXX, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
        tried = subprocess.run(
            command, input="#include <source_location>\n", capture_output=True, text=True, check=False
        )
        if not tried.returncode:
            return compiler
    return None


def installed(name: str) -> Iterator[str]:
    """`name`, then `name-30` down to `name-15`, as Debian calls them."""
    names = (name, *(f"{name}-{version}" for version in range(30, 14, -1)))
    return (found for found in names if shutil.which(found))


def flags(source: Path, cuda: Path | None, stub: str) -> list[str]:
    """How `source` is compiled: with every kernel where there is a CUDA toolkit, whose headers csrc/host needs."""
    chosen = ["-std=c++20", *(flag for flag in CXX_FLAGS if flag.startswith("-D")), *KERNELS]
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        include = Path(torch.origin).parent / "include"
        chosen += [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]
    if cuda or source.is_relative_to(CSRC / "bind"):
        chosen.append('-DOMNI_GRPC_CUDA_ARCHS="90a"')
    if not is_cuda(source):
        return [*chosen, "-x", "c++"] + ([f"-isystem{cuda}/include"] if cuda else [])
    chosen += ["-x", "cuda", "--cuda-host-only", f"--cuda-path={cuda}", "-nocudalib", "-Wno-unknown-cuda-version"]
    folders = [stub, f"{cuda}/include/cccl"]
    if cutlass := find_cutlass():
        folders += [f"{cutlass}/include", f"{cutlass}/tools/util/include"]
    return [*chosen, *NVCC, *(f"-isystem{folder}" for folder in folders)]


def wrong_includes(cleaner: str, source: Path, options: list[str]) -> list[str]:
    """The headers that `source` uses without including them and, in C++ files, those that it includes without use.

    Clang reads the host side of a CUDA file. Code inside `#if __CUDA_ARCH__` is not seen, so an include that looks
    unused may belong to it.
    """
    command = [cleaner, "--print=changes", str(source), "--", "-w", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"clang cannot read it: {first_error(done.stderr)}"]
    included = re.findall(r'^ *# *include [<"](?:.*/)?([^/>"]+)[>"]', source.read_text(encoding="utf-8"), re.MULTILINE)
    findings: dict[str, None] = {}
    for sign, header in re.findall(r'^([+-]) [<"]([^>"]+)[>"]', done.stdout, re.MULTILINE):
        public = next((whole for part, whole in PARTS if part.fullmatch(header)), None)
        if sign == "-":
            if public is None and header not in dict(PARTS).values() and not is_cuda(source):
                findings[f"includes {header} and uses nothing of it"] = None
        elif public is None:
            path = Path(header)
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            findings[f"uses {name} and does not include it"] = None
        elif public and (is_cuda(source) or public == "bind.h") and public not in included and source.name != public:
            findings[f"uses {public} and does not include it"] = None
    return list(findings)


def compile_errors(compiler: str, source: Path, options: list[str]) -> list[str]:
    command = [compiler, "-fsyntax-only", *LIBCXX, *WARNINGS, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [f"does not compile with clang and libc++: {first_error(done.stderr)}"] if done.returncode else []


def first_error(text: str) -> str:
    return next((line for line in text.splitlines() if "error:" in line), text[-500:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="*", metavar="FILE", help="a source file (default: all of csrc/)")
    sys.exit(main(parser.parse_args().files))
