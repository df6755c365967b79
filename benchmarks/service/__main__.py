"""Runs benchmarks by name; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from omni_grpc.config.command_line import Parser
from tools.tiny.kept import kept_checkpoint

from . import __doc__ as description
from . import (
    auth,
    cancel,
    endure,
    fairness,
    fuzz,
    inputs,
    kills,
    lanes,
    overhead,
    preempt,
    recovery,
    resume,
    slow_watcher,
    soak,
    store,
    throughput,
    watchers,
)
from .report import Result, load, write
from .server import ROOT

BENCHMARKS: Mapping[str, Callable[[Path], Result]] = {
    "throughput": throughput.run,
    "recovery": recovery.run,
    "watchers": watchers.run,
    "slow_watcher": slow_watcher.run,
    "overhead": overhead.run,
    "lanes": lanes.run,
    "cancel": cancel.run,
    "preempt": preempt.run,
    "resume": resume.run,
    "inputs": inputs.run,
    "kills": kills.run,
    "fairness": fairness.run,
    "auth": auth.run,
    "store": store.run,
    "soak": soak.run,
    "endure": endure.run,
    "fuzz": fuzz.run,
}


def main() -> int:
    """Exit code: 1 where a promise that is no matter of speed was not kept."""
    parser = Parser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; none: all")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="what to serve (default: a tiny one with random weights, built where it is missing)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results files")
    parser.add_argument("--count", type=int, default=fuzz.Numbers.count, help="fuzz: how many requests")
    parser.add_argument("--seed", type=int, default=fuzz.Numbers.seed, help="fuzz: what the mutations are made from")
    parser.add_argument("--what", choices=fuzz.PARTS, help="fuzz: one part alone, `count` times (default: all)")
    parser.add_argument("--jobs", type=int, default=store.Numbers.jobs, help="store: how many jobs are kept")
    parser.add_argument(
        "--state-url", default="", help="store: an empty database of PostgreSQL, measured beside SQLite"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    checkpoint = options.checkpoint or kept_checkpoint()
    numbers = fuzz.Numbers(count=options.count, seed=options.seed, what=(options.what,) if options.what else fuzz.PARTS)
    kept_jobs = store.Numbers(jobs=options.jobs, state_url=options.state_url)
    runs = {
        **BENCHMARKS,
        "fuzz": lambda checkpoint: fuzz.run(checkpoint, numbers),
        "store": lambda checkpoint: store.measure(kept_jobs),
    }
    kept = [_run(name, runs[name], checkpoint, options.out) for name in options.names or BENCHMARKS]
    return 0 if all(kept) else 1


def _run(name: str, benchmark: Callable[[Path], Result], checkpoint: Path, out: Path) -> bool:
    print(f"\n## {name}\n", flush=True)
    with load() as meanwhile:
        result = benchmark(checkpoint)
    path = write(out, name, result, meanwhile)
    print(result.table())
    print(f"\n{meanwhile.seconds:.0f} s; other processes took {meanwhile.others:.2f} cores meanwhile; {path.name}")
    for problem in result.problems:
        print(f"PROBLEM: {problem}")
    return not result.problems


if __name__ == "__main__":
    sys.exit(main())
