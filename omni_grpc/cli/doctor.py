"""`python -m omni_grpc doctor`: what is installed and what is wrong with it, or whether a model fits."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from omni_grpc.checkpoint import sizes
from omni_grpc.checkpoint.registry import on_hub, open_checkpoint
from omni_grpc.cli import advise
from omni_grpc.config import EngineConfig, backends
from omni_grpc.config.command_line import Parser
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import InvalidArgument, OmniError
from omni_grpc.types.spec import Checkpoint

PACKAGES = ("torch", "diffusers", "transformers", "grpcio", "protobuf")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report. `broken`: something cannot work here until it is repaired."""

    section: str
    name: str
    value: str
    broken: bool = False


def report() -> list[Finding]:
    """Looks at versions, compilers, devices and ops. Imports torch and the op library where torch is installed."""
    findings = [*_versions(), *_compilers()]
    if importlib.util.find_spec("torch") is not None:
        findings += [*_devices(), *_attention(), *_ops()]
    return findings


def render(findings: list[Finding]) -> str:
    """The report as a plain text table; a broken row is marked in its first column."""
    wide_section = max(len(finding.section) for finding in findings)
    wide_name = max(len(finding.name) for finding in findings)
    return "\n".join(
        f"{'!!' if f.broken else '  '} {f.section:{wide_section}}  {f.name:{wide_name}}  {f.value}" for f in findings
    )


def main(argv: Sequence[str] = ()) -> int:
    """Prints the report or, with --advise, whether a model fits. The exit code is 1 where something is broken, or the
    model does not fit.
    """
    args = _parser().parse_args(argv)
    if args.advise is not None:
        return _advise(args)
    findings = report()
    broken = [finding.name for finding in findings if finding.broken]
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print(render(findings))
        if broken:
            print(f"\nbroken: {', '.join(broken)}")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="omni-grpc doctor", description="Shows versions, devices and ops, or whether a model fits.")
    parser.add_argument(
        "--advise",
        metavar="MODEL",
        help="folder, ORG/NAME or demo: say whether the model fits this machine, and with which flags",
    )
    parser.add_argument(
        "--gpus", metavar="NxGIB", help="advise for these GPUs instead of those of this machine: 8x80, or 0"
    )
    parser.add_argument(
        "--memory", type=int, metavar="GIB", help="advise for this much host memory instead of that of this machine"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")
    parser.add_argument("--diffusion-load-format", choices=("auto", "native", "diffusers"), default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _advise(args: argparse.Namespace) -> int:
    try:
        config = EngineConfig.from_settings(
            model=args.advise, revision=args.revision, diffusion_load_format=args.diffusion_load_format
        )
        here = host()
        if args.gpus is not None:
            here = dataclasses.replace(here, gpus=gpus(args.gpus))
        if args.memory is not None:
            here = dataclasses.replace(here, memory=args.memory << 30)
        found = advice(config, here)
    except OmniError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(found), indent=2) if args.json else advise.render(found))
    return 0 if found.fits else 1


def advice(config: EngineConfig, host: advise.Host) -> advise.Advice:
    """Whether a model fits a machine, and how, see advise. Of a model of the hub only configs and headers are fetched.

    Raises CheckpointError for a model that cannot be opened.
    """
    checkpoint, headers = _look(config)
    checkpoint = apply_settings(config, checkpoint)
    return advise.advise(checkpoint, sizes.parts(checkpoint, headers), host, config)


def _look(config: EngineConfig) -> tuple[Checkpoint, dict[str, list[sizes.Header]]]:
    name, load_format = config.model.model, config.model.diffusion_load_format
    if not on_hub(config.model):
        checkpoint = open_checkpoint(name, load_format=load_format)
        return checkpoint, sizes.headers(checkpoint.path)
    from omni_grpc.checkpoint import hub  # here, since it loads a client of the network

    folder, headers = hub.headers(name, revision=config.model.revision)
    return open_checkpoint(folder, name=name, load_format=load_format), headers


def host() -> advise.Host:
    """This machine, as this process may use it."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return advise.Host(
        gpus=tuple(advise.Gpu(properties.name, properties.total_memory) for properties in found),
        memory=_memory(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _memory() -> int:
    """Bytes of the host, or of the container where that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(whole, int(text)) if text.isdigit() else whole


def gpus(text: str) -> tuple[advise.Gpu, ...]:
    """Devices of another machine: NUMBERxGIBIBYTES, or 0. Raises InvalidArgument for anything else."""
    number, _, gigabytes = text.partition("x")
    if not number.isdigit() or not (gigabytes.isdigit() if "x" in text else number == "0"):
        raise InvalidArgument(f"--gpus is {text!r}: expected NUMBERxGIB, for example 8x80, or 0")
    return (advise.Gpu(f"GPU of {gigabytes} GiB", int(gigabytes or 0) << 30),) * int(number)


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
    from omni_grpc.ops.gemm import FP8_CAPABILITY

    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        yield Finding("devices", "cuda", f"no CUDA device is visible to torch, which is built for {built_for}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.1f} GiB"
        products = "FP8 and INT8" if (properties.major, properties.minor) >= FP8_CAPABILITY else "INT8, no FP8"
        yield Finding("devices", f"cuda:{index}", f"{properties.name}, {memory}, capability {capability}: {products}")


def _attention() -> Iterator[Finding]:
    """What each backend is or lacks here, for heads of 128 in the device's precision, and what "auto" is and why."""
    import torch

    from omni_grpc.ops.library import kernels_on

    cuda = torch.cuda.is_available()
    use = backends.Use(
        device="cuda" if cuda else "cpu",
        capability=torch.cuda.get_device_capability(0) if cuda else None,
        dtype="bfloat16" if cuda else "float32",
        head_size=128,
        kernels=kernels_on("cuda" if cuda else "cpu"),
    )
    for name, backend in backends.BACKENDS.items():
        yield Finding("attention", name, backends.lack(backend, use) or f"available: {backend.what}")
    named = backends.kernels_of(backends.AUTO, use)
    why = "the first that can run" if len(named) == 1 else f"the fastest by measured time of {', '.join(named)}"
    yield Finding("attention", backends.AUTO, f"{backends.choose(backends.AUTO, use)}: {why}")
    if cuda:
        yield from _times(named)


def _times(named: Sequence[str]) -> Iterator[Finding]:
    """What "auto" takes for one picture of 1024 x 1024 and for a video, and the times that it goes by."""
    import torch

    from omni_grpc.ops.attention_choice import RowSizes, shape_of
    from omni_grpc.ops.tuning import choices

    for heads, tokens in ((24, 4608), (40, 32760)):
        shape = shape_of(RowSizes(1, True, tokens, tokens), "bfloat16", heads, heads, 128, False)
        times = sorted(choices(torch.device("cuda", 0)).near(shape, frozenset(named)).items(), key=lambda item: item[1])
        said = (
            ", ".join(f"{name} {taken:.0f} us" for name, taken in times) or f"no timings for similar shapes: {named[0]}"
        )
        yield Finding("attention", f"auto, {heads} heads, {tokens} tokens", said)


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
