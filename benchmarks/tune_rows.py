"""Compares builds of the op library on a GPU: the kernels alone, in percent of a copy, and whether they are right.

    python benchmarks/tune_rows.py base.so packs2.so ...
    python benchmarks/tune_rows.py --repeats 5 *.so

Every library runs in a process of its own; they start together and take turns on the GPU. The table has a row for each
op and shape and a column for each library. They differ by what a branch changes, or by the macro OMNI_ROW_PACKS of
csrc/common/rows.cuh, which nvcc takes from NVCC_APPEND_FLAGS.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from omni_grpc.config.command_line import Parser

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES = ((4608, 3072, 1), (9216, 3072, 2), (32760, 5120, 2))
NORM_OPS = ("norm_modulate", "norm_modulate_quantize", "gate_add_norm_modulate", "gate_add_norm_modulate_quantize")
QUANT_OPS = ("gelu_tanh", "quantize_rows", "gelu_tanh_quantize_rows")
SEED = 20
RESULT = "result: "


def main() -> int:
    parser = Parser(description="compare builds of the op library on this machine's GPU")
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=5, help="replays of each graph of 20 calls")
    parser.add_argument("--turn", type=Path, help="file to lock: time the one library in this process, as JSON")
    options = parser.parse_args()
    if options.turn is not None:
        print(RESULT + json.dumps(run(options.libraries[0], options.repeats, options.turn)), flush=True)
        return 0
    start = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.NamedTemporaryFile() as turn:
        command = [sys.executable, __file__, "--repeats", str(options.repeats), "--turn", turn.name]
        processes = {
            library.stem: subprocess.Popen(
                [*command, str(library.resolve())],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for library in options.libraries
        }
        for name, process in processes.items():
            said = process.communicate()[0]
            found = [line for line in said.splitlines() if line.startswith(RESULT)]
            if not found:
                print(f"{name}: exit code {process.returncode}\n{said[-2000:]}", flush=True)
                continue
            results[name] = json.loads(found[-1].removeprefix(RESULT))
            failed = results[name]["failed"]
            print(f"{name}: {'; '.join(failed) or 'all right'}, {time.monotonic() - start:.0f} s", flush=True)
    print(table(results))
    return 1 if len(results) < len(options.libraries) or any(of["failed"] for of in results.values()) else 0


def table(results: dict[str, dict[str, Any]]) -> str:
    """Percent of the copy bandwidth of the same process, and in the rows named copy its GB/s."""
    rows = dict.fromkeys(row for of in results.values() for row in of["gb_per_s"])
    lines = [f"{'% of copy':46}" + "".join(f"{name:>9}" for name in results)]
    for row in rows:
        cells = []
        for of in results.values():
            rate, ceiling = of["gb_per_s"].get(row), of["gb_per_s"].get(f"copy {row.rpartition(' ')[2]}")
            share = rate if row.startswith("copy") else rate and ceiling and 100 * rate / ceiling
            cells.append(f"{share:9.0f}" if share else f"{'-':>9}")
        lines.append(f"{row:46}" + "".join(cells))
    return "\n".join(lines)


def run(library: Path, repeats: int, turn: Path) -> dict[str, Any]:
    """The checks that fail and the GB/s of each op and shape, with this library in place of the package's own."""
    native = loaded(library)
    if not native.runs_on(torch.cuda.get_device_capability()):
        raise SystemExit(native.problem or f"compiled for {native.cuda_archs}")
    from benchmarks import timing

    timing.REPEATS = repeats
    torch.cuda.synchronize()  # imports and the start of CUDA need no turn
    with turn.open("r+") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        return {"gb_per_s": rates(), "failed": failures()}


def rates() -> dict[str, float]:
    from benchmarks import timing

    made: dict[str, float] = {}
    for name, moved, call, sets in timed():
        taken, problem = timing.attempt(timing.time_on_gpu, call, sets)
        if taken is None:
            raise SystemExit(f"{name}: {problem}")
        made[name] = moved / taken / 1e9
    return made


def loaded(library: Path) -> Any:
    """The package's loader, which runs as its ops are imported, is given this path before."""
    name = "omni_grpc.ops.library"
    spec = importlib.util.spec_from_file_location(name, ROOT / "omni_grpc" / "ops" / "library.py")
    assert spec is not None
    assert spec.loader is not None
    loader = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    loader.LIBRARY_PATH = library
    return importlib.import_module("omni_grpc.ops").load_native()


Timed = tuple[str, int, Callable[..., Any], Sequence[tuple[Any, ...]]]


def timed() -> Iterator[Timed]:
    """Names, bytes of a call, the call, and inputs beyond the L2 cache."""
    from benchmarks import bench_cache, bench_norm, bench_quant

    for tokens, channels, rows in SHAPES:
        given = bench_norm.input_sets("cuda", tokens, channels, rows, torch.bfloat16)
        x, at = given[0].x, f"{tokens}x{channels}"
        sets = [(inputs,) for inputs in given]
        yield f"copy {at}", 2 * x.nbytes, bench_norm.copy, sets
        for name in NORM_OPS:
            op = bench_norm.OPS[name]
            yield f"{name} {at}", x.nbytes * (op.reads + op.writes) + x.numel() * op.codes, op.kernel, sets
        pairs = [(inputs.x, inputs.y) for inputs in given]
        for name in QUANT_OPS:
            part = bench_quant.OPS[name]
            moved = x.nbytes + (x.numel() if part.coded else x.nbytes)
            yield f"{name} {at}", moved, part.kernel, pairs
        del given, sets, pairs, x
    yield from timed_rope()
    for tokens, channels in bench_cache.GPU_SHAPES:
        sets = bench_cache._input_sets("cuda", tokens, channels, torch.bfloat16)
        at, moved = f"{tokens}x{channels}", sets[0][0].nbytes
        yield f"copy {at}", 2 * moved, bench_cache.copy, sets
        yield f"compare_store {at}", 3 * moved, bench_cache.kernel, sets
        del sets


def timed_rope() -> Iterator[Timed]:
    from benchmarks import bench_rope

    e4m3, int8 = (functools.partial(bench_rope.codes, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.int8))
    for shape in bench_rope.GPU_SHAPES:
        sets = [(inputs,) for inputs in bench_rope._input_sets("cuda", shape, torch.bfloat16)]
        at = shape.name.replace(",", "").replace(" ", "-")
        for what, call in {
            "copy": bench_rope.copy,
            "qk_norm_rope": bench_rope.kernel,
            "e4m3": e4m3,
            "int8": int8,
        }.items():
            yield f"{what} {at}", bench_rope._moved(shape, torch.bfloat16, what), call, sets
        del sets


def failures() -> list[str]:
    """A part of what tests/ops checks: every third case and every check."""
    from tests.ops import cache_cases, norm_cases, quant_cases, rope_cases

    failed = []
    for family in (norm_cases, quant_cases, rope_cases, cache_cases):
        checks = {f"{case}": functools.partial(family.check_case, case) for case in family.CASES[::3]}
        checks |= {check.__name__: check for check in family.CUDA_CHECKS}
        for name, check in checks.items():
            try:
                check("cuda", SEED)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - a check fails in many ways, and the others still count
                failed.append(f"{family.__name__.rpartition('.')[2]} {name}: {str(error).splitlines()[:1]}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
