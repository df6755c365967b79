"""What it is worth that ranks compute while messages are on their way, in a step of a denoiser at full size.

    python -m benchmarks.bench_overlap [--models Qwen-Image] [--ways Ulysses] [--ranks 2] [--seconds 400]     on GPUs
    python -m benchmarks.bench_overlap --tiny [--ranks 2]     processes on the CPU: it runs, and the times say nothing

Each way to share the work is built twice, once with the library's overlap and once waiting for each message, from the
same random weights; both are in memory, and their steps are timed in turns. A step is timed from when all ranks begin
to when the last one is done, launches and all. "error" is the relative difference of the two predictions, and "alike"
whether all ranks made the same bits in each. Pipeline parallel gets a row for each rank; without overlap it passes on
whole batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks import bench_models, timing, turns
from benchmarks.bench_models import Case, Step
from benchmarks.full_size import WAN
from omni_grpc.config.command_line import Parser
from omni_grpc.features import hsdp, pipeline_parallel, sequence_parallel, ulysses
from omni_grpc.models.flux.flux_transformer import FluxTransformer
from omni_grpc.models.wan.wan_transformer import WanTransformer
from omni_grpc.nn.mesh import Mesh, join
from omni_grpc.types.ranks import ParallelSizes

REPETITIONS = 6
BESIDE, WAITING = "beside", "waiting"


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """How so many ranks share the work: features before there are weights, and after. Those that are switched take
    `overlap`; `always` come last. `batches`: whether it takes a row for each rank.
    """

    sizes: Callable[[int], ParallelSizes]
    before: Sequence[Callable[..., None]] = ()
    after: Sequence[Callable[..., None]] = ()
    always: Sequence[Callable[..., None]] = ()
    batches: bool = False


WAYS: Mapping[str, Shared] = {
    "Ulysses": Shared(
        lambda ranks: ParallelSizes(ulysses_degree=ranks), after=(ulysses.apply, sequence_parallel.apply)
    ),
    "fetched": Shared(lambda ranks: ParallelSizes(sequence_parallel_size=ranks), after=(sequence_parallel.apply,)),
    "ring": Shared(lambda ranks: ParallelSizes(ring_degree=ranks), after=(sequence_parallel.apply,)),
    "HSDP": Shared(
        lambda ranks: ParallelSizes(sequence_parallel_size=ranks, use_hsdp=True),
        before=(hsdp.apply,),
        always=(sequence_parallel.apply,),
    ),
    "pipeline": Shared(
        lambda ranks: ParallelSizes(pipeline_parallel_size=ranks), before=(pipeline_parallel.apply,), batches=True
    ),
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step, medians of `runs`, which has those of both sides. rows: None for as many as the model has
    in bench_models.
    """

    model: str
    way: str
    ranks: int
    rows: int | None
    waiting: float
    beside: float
    error: float
    alike: bool
    runs: Mapping[str, Sequence[float]]


def measure(cases: Sequence[Case], ways: Sequence[str], seconds: float) -> Iterator[Measurement]:
    """On every rank, in the same order. Nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    for case in cases:
        for way in ways:
            if not _all_agree(time.monotonic() < deadline):
                return
            yield _measured(case, way)


@torch.inference_mode()
def _measured(case: Case, way: str) -> Measurement:
    gc.collect()
    if bench_models.DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    shared, ranks = WAYS[way], dist.get_world_size()
    mesh, rows = join(shared.sizes(ranks)), ranks if shared.batches else None
    steps = {side: _built(case, shared, mesh, side == BESIDE, rows) for side in (WAITING, BESIDE)}
    got = {side: step().float() for side, step in steps.items()}
    runs = turns.take_turns(steps, REPETITIONS, _milliseconds)
    alike = [_is_first_ranks(x) for x in got.values()]
    return Measurement(
        model=case.name,
        way=way,
        ranks=ranks,
        rows=rows,
        waiting=statistics.median(runs[WAITING]),
        beside=statistics.median(runs[BESIDE]),
        error=float((got[BESIDE] - got[WAITING]).norm() / got[WAITING].norm()),
        alike=_all_agree(all(alike)),
        runs=runs,
    )


def _built(case: Case, shared: Shared, mesh: Mesh, overlap: bool, rows: int | None) -> Step:
    def switched(features: Sequence[Callable[..., None]]) -> list[Callable[..., None]]:
        return [functools.partial(feature, overlap=overlap) for feature in features]

    after = [*switched(shared.after), *shared.always]
    module, _ = bench_models._built(case, bench_models.WAYS[0], mesh, switched(shared.before), after)
    return case.ours(module) if rows is None else case.ours(module, count=rows)


def _milliseconds(step: Step) -> float:
    """Of the slowest rank."""
    _done()
    dist.barrier()
    _done()
    began = time.perf_counter()
    step()
    _done()
    taken = torch.tensor((time.perf_counter() - began) * 1e3, device=bench_models.DEVICE, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _done() -> None:
    if bench_models.DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _is_first_ranks(x: Tensor) -> bool:
    first = x.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x)


def _all_agree(mine: bool) -> bool:
    all_of_them = torch.tensor(int(mine), device=bench_models.DEVICE)
    dist.all_reduce(all_of_them, dist.ReduceOp.MIN)
    return bool(all_of_them.item())


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        f"{'model':12} {'way':9} {'ranks':>5} {'waiting ms':>10} {'beside ms':>10} {'faster':>7} {'error':>8} alike"
    ]
    for m in measurements:
        figures = f"{m.ranks:5} {m.waiting:10.2f} {m.beside:10.2f} {m.waiting / m.beside:6.2f}x {m.error:8.1e}"
        lines.append(f"{m.model:12} {m.way:9} {figures} {m.alike!s:>5}")
    return "\n".join(lines)


TINY_FLUX: Mapping[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
TINY_WAN: Mapping[str, Any] = {
    **WAN,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "ffn_dim": 64,
    "num_layers": 4,
}


def tiny_cases() -> list[Case]:
    """FLUX and Wan at sizes for any machine."""
    flux, wan = (next(case for case in bench_models.CASES if case.name.startswith(name)) for name in ("FLUX", "Wan"))
    return [
        dataclasses.replace(
            flux,
            build=functools.partial(FluxTransformer.from_config, TINY_FLUX),
            ours=functools.partial(bench_models._flux, text=8, side=4, config=TINY_FLUX),
        ),
        dataclasses.replace(
            wan,
            build=functools.partial(WanTransformer.from_config, TINY_WAN),
            ours=functools.partial(bench_models._wan, text=8, size=(2, 3, 4), config=TINY_WAN),
        ),
    ]


def on_cpu() -> None:
    """What bench_models makes from now on in this process is on the CPU, in float32."""
    bench_models.DEVICE, bench_models.DTYPE = torch.device("cpu"), torch.float32


def _rank(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    if options.tiny:
        torch.set_num_threads(1)
        on_cpu()
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if options.tiny else "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks
    )
    cases = tiny_cases() if options.tiny else [case for case in bench_models.CASES if case.name in options.models]
    made = measure(cases, options.ways, options.seconds)
    if rank or options.tiny:
        measurements = list(made)
    else:
        name = f"overlap-{options.ranks}"
        measurements = timing.recorded("benchmarks/bench_overlap.py", name, made, options.results)
    if rank == 0:
        print(table(measurements))
    dist.destroy_process_group()


def main() -> None:
    names = [case.name for case in bench_models.CASES]
    parser = Parser(description="time steps over ranks that compute while messages are on their way, or wait for them")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--ranks", type=int, default=None, help="of one model (default: all GPUs; 2 with --tiny)")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models on the CPU, joined by gloo; nothing is recorded"
    )
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if not options.tiny:
        timing.require_gpu()
    there = 2 if options.tiny else torch.cuda.device_count()
    options.ranks = options.ranks or there
    if options.ranks < 2 or (options.ranks > there and not options.tiny):
        print(f"needs two GPUs at least, for {options.ranks} ranks; torch finds {there}", file=sys.stderr)
        raise SystemExit(timing.SKIPPED)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (f"{folder}/rendezvous", options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
