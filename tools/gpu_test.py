"""Tests and times the CUDA kernels on a GPU machine; needs torch, and no network. `make gpu-test` runs it.

    python tools/gpu_test.py                    results into benchmarks/results/
    python tools/gpu_test.py --results FOLDER

It takes a library that was built elsewhere where that loads and fits the card, else it builds one here. Without pytest
the same checks run one after the other. The exit code is 1 where a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.util
import json
import re
import secrets
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BENCHMARK_SECONDS = 60
"""For each family. Nothing new is timed after them."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Ops with kernels, tests/ops/<name>_cases.py with CASES, check_case and CUDA_CHECKS, and
    benchmarks/bench_<name>.py with gpu(seconds) and table(measurements).
    """

    name: str
    ops: tuple[str, ...]


FAMILIES = (
    Family("norm", ("norm_modulate",)),
    Family("rope", ("qk_norm_rope", "qk_norm_rope_quantize")),
    Family("image", ("pixels_to_bytes", "latents_to_bytes")),
)
FITS = """
import sys, torch
from omni_grpc import ops
library = ops.load_native()
if not library.loaded:
    sys.exit(library.problem)
if not library.runs_on(torch.cuda.get_device_capability()):
    sys.exit(f"compiled for {library.cuda_archs}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="test and time the CUDA kernels on this machine's GPU")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON file")
    parser.add_argument("--no-benchmark", action="store_true", help="check only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu-test: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    start = time.monotonic()
    ensure_library()
    failures = run_pytest() if importlib.util.find_spec("pytest") else run_checks()
    lines = [f"checks: {'; '.join(failures) if failures else 'all passed'}"]
    if not options.no_benchmark:
        tables, broken = run_benchmarks(options.results, failures)
        lines = [*tables, *lines, *broken]
        failures += broken
    print_doctor()
    print("\n".join(lines))
    print(f"took {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


def ensure_library() -> None:
    """Builds the library in place where the one that is there does not load or does not fit the card."""
    probe = [sys.executable, "-c", FITS]
    found = subprocess.run(probe, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"building the op library here: {found.stderr.strip().splitlines()[-1]}", flush=True)
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
        subprocess.run(probe, cwd=ROOT, check=True)


def run_pytest() -> list[str]:
    """What needs nothing of the service, which this machine may lack."""
    tests = ("tests/ops", "tests/features/test_on_gpu.py")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *tests, "--noconftest", "-p", "no:cacheprovider"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return [f"pytest: exit code {code}"] if code else []


def run_checks() -> list[str]:
    seed, total = secrets.randbelow(2**32), 0
    failures: list[str] = []
    for family in FAMILIES:
        checks = {f"{family.name}: kernels": lambda family=family: check_built(family)}
        try:
            cases = importlib.import_module(f"tests.ops.{family.name}_cases")
            checks |= {
                f"{family.name}: {case}": lambda cases=cases, case=case: cases.check_case(case, "cuda", seed)
                for case in cases.CASES
            }
            checks |= {
                f"{family.name}: {check.__name__}": lambda check=check: check("cuda", seed)
                for check in cases.CUDA_CHECKS
            }
        except Exception:  # noqa: BLE001 - as below
            traceback.print_exc()
            failures.append(f"{family.name}: cases")
        for name, check in checks.items():
            try:
                check()
            except Exception:  # noqa: BLE001 - whatever a check raises is a failure, and the others still run
                traceback.print_exc()
                failures.append(name)
        total += len(checks)
    print(f"no pytest here: {total} checks with seed {seed}, {len(failures)} failed", flush=True)
    return failures


def check_built(family: Family) -> None:
    from omni_grpc import ops

    for op in family.ops:
        assert "CUDA" in ops.kernels()[op], f"{op} has no CUDA kernel"


def run_benchmarks(results: Path, failures: list[str]) -> tuple[list[str], list[str]]:
    """The tables of all families, and which of them failed."""
    lines, broken = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}"], []
    for family in FAMILIES:
        try:
            lines += run_benchmark(family.name, results, failures)
        except Exception:  # noqa: BLE001 - the other families still count
            traceback.print_exc()
            broken.append(f"benchmark of {family.name} failed")
    return lines, broken


def run_benchmark(name: str, results: Path, failures: list[str]) -> list[str]:
    bench = importlib.import_module(f"benchmarks.bench_{name}")
    measurements = bench.gpu(BENCHMARK_SECONDS)
    card = torch.cuda.get_device_name()
    record = {
        "script": "tools/gpu_test.py",
        "card": card,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "failed_checks": failures,
        "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
    }
    results.mkdir(parents=True, exist_ok=True)
    file = results / f"{re.sub(r'[^a-z0-9]+', '-', card.lower())}-{name}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    return [f"--- {name}", bench.table(measurements), f"written: {file}"]


def print_doctor() -> None:
    from omni_grpc import doctor

    print(doctor.render(doctor.report()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
