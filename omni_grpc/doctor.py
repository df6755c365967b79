"""`python -m omni_grpc doctor`: what this installation is made of, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "diffusers", "transformers", "grpcio", "protobuf")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report. `broken` says that something here cannot work until it is repaired."""

    section: str
    name: str
    value: str
    broken: bool = False


def report() -> list[Finding]:
    """Looks at versions, compilers, devices and ops. Imports torch and the op library where torch is installed."""
    findings = [*_versions(), *_compilers()]
    if importlib.util.find_spec("torch") is not None:
        findings += [*_devices(), *_ops()]
    return findings


def render(findings: list[Finding]) -> str:
    """The report as a plain text table; a broken row is marked in its first column."""
    wide_section = max(len(finding.section) for finding in findings)
    wide_name = max(len(finding.name) for finding in findings)
    return "\n".join(
        f"{'!!' if f.broken else '  '} {f.section:{wide_section}}  {f.name:{wide_name}}  {f.value}" for f in findings
    )


def main() -> int:
    """Prints the report. The exit code is 1 where something is broken."""
    findings = report()
    print(render(findings))
    broken = [finding for finding in findings if finding.broken]
    if broken:
        print(f"\nbroken: {', '.join(finding.name for finding in broken)}")
    return 1 if broken else 0


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", f"{platform.python_version()} ({sys.executable})")
    for package in PACKAGES:
        try:
            yield Finding("versions", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", package, f"not installed: pip install {package}", broken=True)


def _compilers() -> Iterator[Finding]:
    yield Finding("compilers", "c++", shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) or "not found")
    nvcc = shutil.which("nvcc") or next(
        (
            str(path)
            for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
            if root and (path := Path(root, "bin", "nvcc")).is_file()
        ),
        None,
    )
    yield Finding("compilers", "nvcc", f"{nvcc}, {_nvcc_version(nvcc)}" if nvcc else "not found")


def _nvcc_version(nvcc: str) -> str:
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = [line for line in answer.stdout.splitlines() if "release" in line]
    return release[0].partition("release ")[2].partition(",")[0] if release else f"exit code {answer.returncode}"


def _devices() -> Iterator[Finding]:
    # Not at the top: the report must come out where torch is missing, which is one of the things it is read for.
    import torch

    yield Finding("devices", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        yield Finding("devices", "cuda", f"none is visible to a torch built for {built_for}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.1f} GiB"
        yield Finding("devices", f"cuda:{index}", f"{properties.name}, {memory}, capability {capability}")


def _ops() -> Iterator[Finding]:
    import torch

    from omni_grpc import ops

    library = ops.load_native()
    built_for = f"CUDA for sm_{', sm_'.join(library.cuda_archs)}" if library.cuda_archs else "no CUDA kernels"
    state = f"loaded, {built_for}" if library.loaded else library.problem
    yield Finding("ops", "library", f"{library.path}: {state}", broken=library.broken)
    for index in range(torch.cuda.device_count() if library.cuda_archs else 0):
        if not library.runs_on(torch.cuda.get_device_capability(index)):
            fix = "rebuild it on this machine (make setup)"
            yield Finding("ops", "library", f"its CUDA kernels do not run on cuda:{index}; {fix}", broken=True)
    for op, keys in ops.kernels().items():
        names = ", ".join(f"{key.lower()} kernel" for key in keys)
        yield Finding("ops", op, names or "reference only")


if __name__ == "__main__":
    sys.exit(main())
