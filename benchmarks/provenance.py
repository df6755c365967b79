"""What a record of a measurement says of where it comes from. Every script that writes one calls `about` for it.

    python -m benchmarks.provenance benchmarks/results/cpu-rope.txt benchmarks/bench_rope.py --device cpu

keeps what a script prints, with where it comes from above it, or adds that to a JSON file that it writes. A copy of the
tree without .git says its commit in OMNI_GRPC_COMMIT; without either, the record says that it is unknown, and
tests/benchmarks refuses it in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from omni_grpc.config.command_line import Parser

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "OMNI_GRPC_COMMIT"
UNKNOWN = f"unknown: no git here, and {COMMIT} is not set"
PACKAGES = (
    "torch", "diffusers", "transformers", "grpcio", "protobuf", "torchao", "triton", "fa3-fwd", "flash-attn", "kernels",
)  # fmt: skip
LIBRARIES = ("nvidia-cublas", "nvidia-cudnn")
"""Beginnings of the names of packages that carry CUDA's libraries: the rest of a name says the version of CUDA."""
KEYS = ("script", "commit", "date", "python", "packages", "machine")
"""What every record has."""


def about(script: str) -> dict[str, Any]:
    """The script, the commit (with "+changes" where tracked files differ from it), the day in UTC, versions of Python
    and of the packages that are installed, and the machine: its processor and, where torch finds one, its GPU.
    """
    return {
        "script": script,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "packages": packages(),
        "machine": {"cpu": cpu(), "cores": len(os.sched_getaffinity(0)), **gpu()},
    }


def text(script: str) -> str:
    """The same as one line, for records that are text."""
    known = about(script)
    versions = ", ".join(f"{name} {version}" for name, version in known["packages"].items())
    machine = ", ".join(f"{name} {value}" for name, value in known["machine"].items())
    return f"# {script}: commit {known['commit']}, {known['date']}, python {known['python']}, {versions}; {machine}"


def commit() -> str:
    if given := os.environ.get(COMMIT):
        return given
    if not (ROOT / ".git").exists():
        return UNKNOWN
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head[:12]}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head[:12]
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def packages() -> Mapping[str, str]:
    """Of PACKAGES and of CUDA's libraries, those that are installed."""
    found = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions() if one.metadata["Name"]}
    libraries = sorted(name for name in found if name.startswith(LIBRARIES))
    return {name: found[name] for name in (*PACKAGES, *libraries) if name in found}


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu() -> Mapping[str, str]:
    """Nothing where there is no GPU, or no torch."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "driver": _driver()}


def _driver() -> str:
    """The version that /proc says, without starting a program."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text(encoding="utf-8").split() if file.is_file() else []
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")


def main() -> None:
    """Runs a script and keeps what it prints, with `text` above it, or adds `about` to the JSON that it writes."""
    parser = Parser(description=(main.__doc__ or "").partition("\n")[0])
    parser.add_argument("record", type=Path, help="a .txt for what is printed, or the .json that the script writes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what follows `python`: -m benchmarks.bench_vae")
    options = parser.parse_args()
    command, load = f"python {shlex.join(options.command)}", os.getloadavg()[0]
    done = subprocess.run([sys.executable, *options.command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    if options.record.suffix == ".json":
        made = about(command) | {"load_before": load} | json.loads(options.record.read_text(encoding="utf-8"))
        content = json.dumps(made, indent=1) + "\n"
    else:
        content = f"{text(command)}\n# load of the machine before: {load:.1f}\n{done.stdout}"
    options.record.write_text(content, encoding="utf-8")
    print(done.stdout, end="")


if __name__ == "__main__":
    main()
