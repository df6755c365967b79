"""What several GPUs are worth in a step of a denoiser at full size: tokens, heads, weights or guidance branches spread
over them by NCCL.

    python -m benchmarks.bench_parallel [--models Qwen-Image] [--spreads Ulysses ring] [--by fp8] [--seconds 200]

on two GPUs or more. The record is called parallel- and their number, and what --record adds.

Weights are random and the same on all ranks. A step is timed from when all ranks begin to when the last one is done,
launches and all. "nccl" is the share of it in which a kernel of NCCL runs on the first rank, waiting for others
included; "error" is the relative difference of the prediction to that of one GPU in the same precision, and "alike"
whether all ranks made the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks import timing
from benchmarks.bench_models import CASES, WAYS, Case, Edit, Step, Way, _built
from omni_grpc.config.command_line import Parser
from omni_grpc.features import hsdp, sequence_parallel, tensor_parallel, ulysses
from omni_grpc.nn.mesh import join
from omni_grpc.types.ranks import Axis, ParallelSizes

STEPS, FEW = 5, 2
LONG = 1000.0
"""Milliseconds of a step from which on a few tell enough."""
PORT = 29541
SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "Qwen-Image": {"1024": {}, "1536": {"side": 96}, "2048": {"side": 128}},
    "FLUX.1-dev": {"1024": {}},
    "Wan2.2-A14B": {"480p 81f": {}, "720p 81f": {"size": (21, 45, 80)}},
}
"""What is made of each model, and what it takes for that."""
GUIDED = ("Qwen-Image",)
"""Models whose steps have a row with the prompt and one without."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How so many ranks share the work, and features before there are weights, and after all others. `branches`: over
    so many ranks the rows of a step are spread, one for each.
    """

    sizes: Callable[[int], ParallelSizes] = lambda ranks: ParallelSizes(sequence_parallel_size=ranks)
    before: Sequence[Edit] = ()
    after: Sequence[Edit] = ()
    branches: int = 1


ALONE = "one GPU"
SPREADS: Mapping[str, Spread] = {
    ALONE: Spread(),
    "sequence parallel": Spread(after=(sequence_parallel.apply,)),
    "ring": Spread(lambda ranks: ParallelSizes(ring_degree=ranks), after=(sequence_parallel.apply,)),
    "Ulysses": Spread(
        lambda ranks: ParallelSizes(ulysses_degree=ranks), after=(ulysses.apply, sequence_parallel.apply)
    ),
    "tensor parallel": Spread(lambda ranks: ParallelSizes(tensor_parallel_size=ranks), before=(tensor_parallel.apply,)),
    "HSDP": Spread(
        lambda ranks: ParallelSizes(sequence_parallel_size=ranks, use_hsdp=True),
        before=(hsdp.apply,),
        after=(sequence_parallel.apply,),
    ),
    "CFG parallel": Spread(
        # two branches; more ranks share the tokens of each
        lambda ranks: ParallelSizes(cfg_parallel_size=2, sequence_parallel_size=ranks // 2),
        after=(sequence_parallel.apply,),
        branches=2,
    ),
}
BY = {way.name.removeprefix("ours "): way for way in WAYS if way.precision == "auto"}
"""How ours computes."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step, and of its launch; the most memory that a rank had; the share of NCCL's kernels."""

    model: str
    size: str
    what: str
    spread: str
    ranks: int
    milliseconds: float
    host: float
    gib: float
    nccl: float
    error: float | None
    alike: bool


def measure(options: argparse.Namespace) -> Iterator[Measurement]:
    """On every rank, in the same order. Nothing new starts after `seconds`."""
    deadline = time.monotonic() + options.seconds
    for case in (case for case in CASES if case.name in options.models):
        for way in map(BY.__getitem__, options.by):
            wanted: dict[str, Tensor] = {}
            for name in (ALONE, *options.spreads):
                if not _all_agree(time.monotonic() < deadline):
                    return
                if SPREADS[name].branches == 1 or case.name in GUIDED:
                    yield from _measured(case, way, name, wanted, deadline)


@torch.inference_mode()
def _measured(case: Case, way: Way, name: str, wanted: dict[str, Tensor], deadline: float) -> Iterator[Measurement]:
    """Size by size. `wanted` gets what one GPU predicts."""
    gc.collect()
    torch.cuda.empty_cache()
    spread = SPREADS[name]
    mesh = join(spread.sizes(dist.get_world_size()))
    # ranks that share nothing have no group to share it in
    after = spread.after if spread.branches == 1 or dist.get_world_size() > spread.branches else ()
    module, _ = _built(case, way, mesh, spread.before, after)
    for size, inputs in SIZES[case.name].items():
        if not _all_agree(time.monotonic() < deadline):
            return
        torch.manual_seed(1)
        if spread.branches == 1:
            step = case.ours(module, **inputs)
        else:
            # each rank has one of the rows that one GPU has
            group = mesh.of(Axis.CFG, "rows are spread over the branches")
            step = functools.partial(_gathered, case.ours(module, count=1, **inputs), group)
        yield _one(case, way, name, size, step, wanted)


def _gathered(step: Step, group: dist.ProcessGroup) -> Tensor:
    mine = step()
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine.contiguous(), group=group)
    return torch.cat(rows)


def _one(case: Case, way: Way, name: str, size: str, step: Step, wanted: dict[str, Tensor]) -> Measurement:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    got = step()
    taken = [_time(step)]
    taken += [_time(step) for _ in range(STEPS if taken[0][0] < LONG else FEW)]
    gib = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
    dist.all_reduce(gib, dist.ReduceOp.MAX)
    first = got.clone()
    dist.broadcast(first, 0)
    if name == ALONE:
        wanted[size] = got
    # the noise of branches over ranks is that of one row
    like = wanted.get(size) if SPREADS[name].branches == 1 and name != ALONE else None
    return Measurement(
        model=case.name,
        size=size,
        what=way.name,
        spread=name,
        ranks=1 if name == ALONE else dist.get_world_size(),
        milliseconds=statistics.median(total for total, _ in taken[1:]),
        host=statistics.median(host for _, host in taken[1:]),
        gib=float(gib),
        nccl=_share_of_nccl(step),
        error=None if like is None else float((got.float() - like.float()).norm() / like.float().norm()),
        alike=_all_agree(torch.equal(first, got)),
    )


def _share_of_nccl(step: Step) -> float:
    """Of the time from a step's first kernel to the end of its last one, on this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in profile.events()]
    if not spans:
        return 0.0
    whole = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    return sum(end - start for start, end, name in spans if "nccl" in name.lower()) / whole


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
    names = f"{'model':12} {'size':8} {'what':10} {'spread':18}"
    lines = [f"{names} {'ranks':>5} {'ms':>8} {'host':>7} {'GiB':>6} {'nccl':>5} {'error':>8} alike"]
    for m in measurements:
        figures = f"{m.ranks:5} {m.milliseconds:8.1f} {m.host:7.1f} {m.gib:6.1f} {m.nccl:5.0%}"
        error = "" if m.error is None else f"{m.error:.1e}"
        lines.append(f"{m.model:12} {m.size:8} {m.what:10} {m.spread:18} {figures} {error:>8} {m.alike!s:>5}")
    return "\n".join(lines)


def _rank(rank: int, count: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=count)
    made = measure(options)
    if rank == 0:
        name = f"parallel-{count}{options.record}"
        print(table(timing.recorded("benchmarks/bench_parallel.py", name, made, options.results)))
    else:
        for _ in made:
            pass
    dist.destroy_process_group()


def main() -> None:
    parser = Parser(description="time steps on one GPU and spread over all that there are")
    spreads, models = [name for name in SPREADS if name != ALONE], list(SIZES)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--spreads", nargs="+", choices=spreads, default=spreads)
    parser.add_argument("--by", nargs="+", choices=list(BY), default=["bf16", "fp8"])
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--record", default="", help="added to the name of the record")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    timing.require_gpu()
    count = torch.cuda.device_count()
    if count < 2:
        print("needs at least two GPUs, and torch finds one", file=sys.stderr)
        raise SystemExit(timing.SKIPPED)
    multiprocessing.spawn(_rank, (count, options), nprocs=count)


if __name__ == "__main__":
    main()
