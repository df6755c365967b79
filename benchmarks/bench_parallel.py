"""What two GPUs are worth in a step of a denoiser at full size: tokens, heads or weights spread over them by NCCL.

    python -m benchmarks.bench_parallel [--models Qwen-Image] [--seconds 200] [--results FOLDER]     on two GPUs or more

Weights are random and the same on all ranks. A step is timed from when all ranks begin to when the last one is done,
launches and all. "error" is the relative difference of the prediction to that of one GPU in the same precision, and
"alike" whether all ranks made the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks import timing
from benchmarks.bench_models import CASES, WAYS, Case, Edit, Step, Way, _built, options_of
from omni_grpc.features import sequence_parallel, tensor_parallel, ulysses
from omni_grpc.nn.mesh import join
from omni_grpc.types.ranks import ParallelSizes

STEPS = 5
PORT = 29541


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How so many ranks share the work, and features before there are weights, and after all others."""

    sizes: Callable[[int], ParallelSizes] = lambda ranks: ParallelSizes(sequence_parallel_size=ranks)
    before: Sequence[Edit] = ()
    after: Sequence[Edit] = ()


ALONE = "one GPU"
SPREADS: Mapping[str, Spread] = {
    ALONE: Spread(),
    "sequence parallel": Spread(after=(sequence_parallel.apply,)),
    "ring": Spread(lambda ranks: ParallelSizes(ring_degree=ranks), after=(sequence_parallel.apply,)),
    "Ulysses": Spread(
        lambda ranks: ParallelSizes(ulysses_degree=ranks), after=(ulysses.apply, sequence_parallel.apply)
    ),
    "tensor parallel": Spread(lambda ranks: ParallelSizes(tensor_parallel_size=ranks), before=(tensor_parallel.apply,)),
}
BY = ("ours bf16", "ours fp8", "ours int8")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step, and of its launch; the most memory that a rank had."""

    model: str
    what: str
    spread: str
    ranks: int
    milliseconds: float
    host: float
    gib: float
    error: float | None
    alike: bool


def measure(names: Sequence[str], seconds: float) -> Iterator[Measurement]:
    """On every rank, in the same order. Nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    for case in CASES:
        for way in WAYS:
            if case.name not in names or way.name not in BY:
                continue
            wanted: Tensor | None = None
            for name in SPREADS:
                if not _all_agree(time.monotonic() < deadline):
                    return
                made, got = _measured(case, way, name, wanted)
                wanted = got if name == ALONE else wanted
                yield made


@torch.inference_mode()
def _measured(case: Case, way: Way, name: str, wanted: Tensor | None) -> tuple[Measurement, Tensor]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    spread = SPREADS[name]
    mesh = join(spread.sizes(dist.get_world_size()))
    module, _ = _built(case, way, mesh, spread.before, spread.after)
    step = case.ours(module)
    got = step()
    taken = [_time(step) for _ in range(STEPS)]
    gib = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
    dist.all_reduce(gib, dist.ReduceOp.MAX)
    first = got.clone()
    dist.broadcast(first, 0)
    error = None if wanted is None else float((got.float() - wanted.float()).norm() / wanted.float().norm())
    return (
        Measurement(
            model=case.name,
            what=way.name,
            spread=name,
            ranks=1 if name == ALONE else dist.get_world_size(),
            milliseconds=statistics.median(total for total, _ in taken),
            host=statistics.median(host for _, host in taken),
            gib=float(gib),
            error=error,
            alike=_all_agree(torch.equal(first, got)),
        ),
        got,
    )


def _time(step: Step) -> tuple[float, float]:
    """Of the slowest rank."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    taken = torch.tensor([time.perf_counter() - began, host], device="cuda", dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    total, host = taken.tolist()
    return total * 1e3, host * 1e3


def _all_agree(mine: bool) -> bool:
    all_of_them = torch.tensor(int(mine), device="cuda")
    dist.all_reduce(all_of_them, dist.ReduceOp.MIN)
    return bool(all_of_them.item())


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'model':12} {'what':10} {'spread':18} {'ranks':>5} {'ms':>8} {'host':>7} {'GiB':>6} {'error':>8} alike"]
    for m in measurements:
        figures = f"{m.ranks:5} {m.milliseconds:8.1f} {m.host:7.1f} {m.gib:6.1f}"
        error = "" if m.error is None else f"{m.error:.1e}"
        lines.append(f"{m.model:12} {m.what:10} {m.spread:18} {figures} {error:>8} {m.alike!s:>5}")
    return "\n".join(lines)


def _rank(rank: int, count: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=count)
    made = measure(options.models, options.seconds)
    if rank == 0:
        print(table(timing.recorded("benchmarks/bench_parallel.py", "parallel", made, options.results)))
    else:
        for _ in made:
            pass
    dist.destroy_process_group()


def main() -> None:
    options = options_of("time steps on one GPU and spread over all that there are")
    timing.require_gpu()
    count = torch.cuda.device_count()
    if count < 2:
        print("needs at least two GPUs, and torch finds one", file=sys.stderr)
        raise SystemExit(timing.SKIPPED)
    multiprocessing.spawn(_rank, (count, options), nprocs=count)


if __name__ == "__main__":
    main()
