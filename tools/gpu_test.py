"""Tests and times the CUDA kernels on a GPU machine; needs torch, and no network. `make gpu-test` runs it.

    python tools/gpu_test.py                    results into benchmarks/results/
    python tools/gpu_test.py --results FOLDER
    python tools/gpu_test.py --family norm      one family, in this process

A family is a file tests/ops/<family>_cases.py, with CASES, check_case and CUDA_CHECKS, and where there is one
benchmarks/bench_<family>.py, with gpu(seconds) and table(measurements). Each runs in a process of its own, since after
a fault of a kernel a process can do nothing more on the GPU. It takes a library that was built elsewhere where that
loads and fits the card, else it builds one here. The exit code is 1 where a check fails or a family does not come to
its end.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omni_grpc.config.command_line import Parser
from omni_grpc.ops.lora import UNPROVEN

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "ops"
BENCHMARK_SECONDS = 60
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
    parser = Parser(description="test and time the CUDA kernels on this machine's GPU")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON files"
    )
    parser.add_argument("--no-benchmark", action="store_true", help="check only")
    parser.add_argument("--family", choices=families(), help="this one alone")
    parser.add_argument("--seconds", type=float, default=BENCHMARK_SECONDS, help="of each family's benchmark")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu-test: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    start = time.monotonic()
    # what no GPU has run yet is to be checked here first
    os.environ.setdefault(UNPROVEN, "1")
    ensure_library()
    if options.family:
        return run_family(options.family, None if options.no_benchmark else options.results, options.seconds)
    print_provenance()
    failures = [*without_kernel(), *run_marked_tests()]
    rest = [
        "--results",
        str(options.results),
        "--seconds",
        str(options.seconds),
        *(["--no-benchmark"] if options.no_benchmark else []),
    ]
    for family in families():
        command = [sys.executable, __file__, "--family", family, *rest]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        failures += [f"{family}: exit code {code}"] if code else []
    print_doctor()
    print(f"checks: {'; '.join(failures) if failures else 'all passed'}")
    print(f"took {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


def families() -> list[str]:
    return sorted(path.stem.removesuffix("_cases") for path in CASES.glob("*_cases.py"))


def ensure_library() -> None:
    """Builds the library in place where the one that is there does not load or does not fit the card."""
    probe = [sys.executable, "-c", FITS]
    found = subprocess.run(probe, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"building the op library here: {found.stderr.strip().splitlines()[-1]}", flush=True)
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
        subprocess.run(probe, cwd=ROOT, check=True)


def without_kernel() -> list[str]:
    from omni_grpc import ops

    found = ops.kernels().items()
    return [f"{op} has no CUDA kernel" for op, keys in found if "CUDA" not in keys and not op.endswith("_cpu")]


def run_marked_tests() -> list[str]:
    """The tests of what is built on the ops, where pytest is: they need more of the package than the ops do."""
    if not importlib.util.find_spec("pytest"):
        return []
    paths = (
        "tests/features/test_on_gpu.py",
        "tests/features/test_lora_batches.py",
        "tests/features/test_models_on_gpu.py",
        "tests/parallel/test_on_gpus.py",
        "tests/worker/test_lost_device.py",
        "tests/worker/test_residency_on_gpu.py",
        "tests/pipeline/test_causal_vae.py",
        "tests/ops/test_linear.py",
    )
    # without the conftests, which need of the service what this machine may lack
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *paths, "--noconftest", "-p", "no:cacheprovider"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return [f"{', '.join(paths)}: exit code {code}"] if code else []


def run_family(family: str, results: Path | None, seconds: float) -> int:
    print(f"== {family}", flush=True)
    failures = run_checks(family)
    if results is not None and (ROOT / "benchmarks" / f"bench_{family}.py").is_file():
        print("\n".join(run_benchmark(family, results, seconds, failures)), flush=True)
    print(f"{family}: {'; '.join(failures) if failures else 'all checks passed'}", flush=True)
    return 1 if failures else 0


def run_checks(family: str) -> list[str]:
    cases = importlib.import_module(f"tests.ops.{family}_cases")
    seed = secrets.randbelow(2**32)
    checks = {str(case): lambda case=case: cases.check_case(case, "cuda", seed) for case in cases.CASES}
    checks |= {check.__name__: lambda check=check: check("cuda", seed) for check in cases.CUDA_CHECKS}
    failures = []
    for name, check in checks.items():
        try:
            check()
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - whatever a check raises is a failure, and the others still run
            traceback.print_exc()
            failures.append(name)
    print(f"{len(checks)} checks with seed {seed}, {len(failures)} failed", flush=True)
    return failures


def run_benchmark(family: str, results: Path, seconds: float, failures: list[str]) -> list[str]:
    from benchmarks import timing

    bench = importlib.import_module(f"benchmarks.bench_{family}")
    measurements = bench.gpu(seconds)
    file = timing.record("tools/gpu_test.py", family, measurements, results, failed_checks=failures)
    return [f"{torch.cuda.get_device_name()}, torch {torch.__version__}", bench.table(measurements), f"written: {file}"]


def print_provenance() -> None:
    from benchmarks import provenance

    print(provenance.text("tools/gpu_test.py"), flush=True)


def print_doctor() -> None:
    from omni_grpc.cli import doctor

    print(doctor.render(doctor.report()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
