"""Runs benchmarks by name; see the package's docstring."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from omni_grpc.config.command_line import Parser
from tools.tiny.kept import kept_checkpoint

from . import __doc__ as description
from . import (
    accept,
    auth,
    cancel,
    crowd,
    delay,
    endure,
    fairness,
    fuzz,
    inputs,
    kills,
    lanes,
    lives,
    lora_sequences,
    models,
    overhead,
    page,
    preempt,
    rank_loss,
    ray_kills,
    recovery,
    replicas,
    restarts,
    resume,
    saturation,
    slow_watcher,
    soak,
    stacks,
    store,
    takeover,
    telemetry_cost,
    throughput,
    trace_cost,
    watchers,
)
from .report import Result, load, write
from .server import ROOT

BENCHMARKS: Mapping[str, Callable[[Path], Result]] = {
    "throughput": throughput.run,
    "recovery": recovery.run,
    "page": page.run,
    "watchers": watchers.run,
    "crowd": crowd.run,
    "saturation": saturation.run,
    "slow_watcher": slow_watcher.run,
    "stacks": stacks.run,
    "overhead": overhead.run,
    "telemetry_cost": telemetry_cost.run,
    "lanes": lanes.run,
    "cancel": cancel.run,
    "preempt": preempt.run,
    "resume": resume.run,
    "inputs": inputs.run,
    "kills": kills.run,
    "ray": ray_kills.run,
    "rank_loss": rank_loss.run,
    "replicas": replicas.run,
    "models": models.run,
    "delay": delay.run,
    "fairness": fairness.run,
    "auth": auth.run,
    "trace_cost": trace_cost.run,
    "store": store.run,
    "restarts": restarts.run,
    "accept": accept.run,
    "takeover": takeover.run,
    "soak": soak.run,
    "endure": endure.run,
    "fuzz": fuzz.run,
    "lora_sequences": lora_sequences.run,
}

WITHOUT_CHECKPOINT = frozenset(
    {
        "store",
        "restarts",
        "accept",
        "takeover",
        "ray",
        "page",
        "telemetry_cost",
        "trace_cost",
        "saturation",
        "lora_sequences",
    }
)


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
    parser.add_argument("--count", type=int, help="fuzz: how many requests; lora_sequences: how many sequences")
    parser.add_argument(
        "--seed", type=int, default=fuzz.Numbers.seed, help="fuzz, lora_sequences: what is random in them"
    )
    parser.add_argument("--what", choices=fuzz.PARTS, help="fuzz: one part alone, `count` times (default: all)")
    parser.add_argument("--jobs", type=int, default=store.Numbers.jobs, help="store: how many jobs are kept")
    parser.add_argument(
        "--state-url",
        default="",
        help="an empty database of PostgreSQL (store: measured beside SQLite; others start one where none is given)",
    )
    parser.add_argument("--kills", type=int, help="restarts, ray, replicas and rank_loss: how often")
    parser.add_argument(
        "--store",
        type=_listed,
        default=(),
        help=f"of {', '.join(lives.STORES)}; restarts: one (default {restarts.Numbers.store}), accept: several (all)",
    )
    parser.add_argument("--clients", type=_listed, default=(), help="accept: how many at a time, such as 1,16,64")
    parser.add_argument("--worker", choices=lives.COMMANDS, default=lives.QUICK, help="restarts: whose worker")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    # Ray is an extra
    names = options.names or [name for name in BENCHMARKS if name != "ray" or find_spec("ray") is not None]
    # building it takes a while
    checkpoint = options.checkpoint or (Path() if WITHOUT_CHECKPOINT.issuperset(names) else kept_checkpoint())
    numbers = fuzz.Numbers(
        count=options.count or fuzz.Numbers.count,
        seed=options.seed,
        what=(options.what,) if options.what else fuzz.PARTS,
    )
    sequences = lora_sequences.Numbers(count=options.count or lora_sequences.Numbers.count, seed=options.seed)
    kept_jobs = store.Numbers(jobs=options.jobs, state_url=options.state_url)
    killed = restarts.Numbers(
        kills=options.kills or restarts.Numbers.kills,
        store=options.store[0] if options.store else restarts.Numbers.store,
        worker=options.worker,
        state_url=options.state_url,
        seed=options.seed,
    )
    accepted = accept.Numbers(
        stores=options.store or accept.Numbers.stores,
        clients=tuple(map(int, options.clients)) or accept.Numbers.clients,
    )
    runs = {
        **BENCHMARKS,
        "fuzz": lambda checkpoint: fuzz.run(checkpoint, numbers),
        "store": lambda checkpoint: store.measure(kept_jobs),
        "restarts": lambda checkpoint: restarts.measure(killed),
        "ray": lambda checkpoint: ray_kills.measure(ray_kills.Numbers(kills=options.kills or ray_kills.Numbers.kills)),
        "replicas": lambda checkpoint: replicas.measure(
            checkpoint, replicas.Numbers(kills=options.kills or replicas.Numbers.kills)
        ),
        "rank_loss": lambda checkpoint: rank_loss.measured(
            checkpoint, rank_loss.Numbers(rounds=options.kills or rank_loss.Numbers.rounds)
        ),
        "accept": lambda checkpoint: accept.measure(accepted),
        "lora_sequences": lambda checkpoint: lora_sequences.run(checkpoint, sequences),
    }
    kept = [_run(name, runs[name], checkpoint, options.out) for name in names]
    return 0 if all(kept) else 1


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


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
