"""What a rank holds of a model whose weights are spread: tensor parallel, and sharded (HSDP), beside one process.

    python -m benchmarks.bench_rank_memory [--device cpu] [--ranks 1,2,4]

A Qwen-Image with random weights is written to a temporary folder: its transformer has --layers blocks of --heads heads
of 128; text encoder and VAE are tiny. Ranks load it as a server's do, one process each, and take the steps of a request
of 256 x 256. In MiB of the rank that has the most: all weights; those of the linear layers of the blocks; what the
process, or the GPU, has more after loading than before; and how much more than that a step needs at most. On a CPU that
is memory of the process that no file backs, in float32; on GPUs what torch has allocated, in bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from benchmarks import provenance
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.config.command_line import Parser
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.mesh import Mesh, join
from omni_grpc.nn.stack import Stack
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.settings import facts_of
from omni_grpc.types.ranks import ParallelSizes
from omni_grpc.types.request import Draft
from omni_grpc.worker.base import RunnerContext
from omni_grpc.worker.packed import PackedRunner

MIB = 2**20
SIZE, STEPS = 256, 2
PREFIX = "omni-bench-ranks-"
PATIENCE = 280
"""Seconds that a rank of one way gets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a rank has."""

    weights: int
    of_blocks: int
    loaded: int
    step: int


def ways(counts: Sequence[int]) -> Iterator[tuple[str, ParallelSizes]]:
    yield "one process", ParallelSizes()
    for count in (count for count in counts if count > 1):
        yield "tensor parallel", ParallelSizes(tensor_parallel_size=count)
    for count in (count for count in counts if count > 1):
        yield "HSDP", ParallelSizes(sequence_parallel_size=count, use_hsdp=True)
    if max(counts) >= 4:
        yield "HSDP, 2 x 2", ParallelSizes(sequence_parallel_size=4, use_hsdp=True, hsdp_shard_size=2)


def tensors(module: nn.Module) -> int:
    """Bytes of parameters and buffers, of which sharded weights are one kind."""
    return sum(tensor.nbytes for tensor in itertools.chain(module.parameters(), module.buffers()))


def of_blocks(module: nn.Module) -> int:
    """Those of the linear layers of the blocks: what both ways can spread."""
    stacks = [part for part in module.modules() if isinstance(part, Stack)]
    layers = [
        layer
        for stack in stacks
        for name in stack.groups
        for block in stack.group(name)
        for path, layer in block.named_modules()
        if isinstance(layer, AnyLinear) and not any(_within(path, outer) for outer in _linears(block))
    ]
    return sum(map(tensors, layers))


def _linears(block: nn.Module) -> list[str]:
    return [path for path, part in block.named_modules() if isinstance(part, AnyLinear)]


def _within(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")


class Gauge:
    """The memory of this process, or of its GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self.now()

    def now(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else _status("RssAnon")

    def reset(self) -> None:
        """Begins a new peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self.floor = torch.cuda.memory_allocated() if self.device.type == "cuda" else _status("VmRSS")

    def above(self) -> int:
        """The peak, beyond what there was when it began."""
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else _status("VmHWM")
        return peak - self.floor


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@torch.inference_mode()
def measure(folder: Path, device: torch.device, mesh: Mesh | None) -> Held:
    """On every rank of the mesh; None: alone."""
    config = EngineConfig.from_settings(
        model=str(folder), device=device.type, cpu_threads=1, warm_up_seconds=0, cuda_graph_tokens=0
    )
    checkpoint = open_checkpoint(folder, name="random")
    gauge = Gauge(device)
    loaded = PackedRunner.load(
        RunnerContext(
            config=config,
            checkpoint=checkpoint,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            prefix=PREFIX,
            tell=lambda loading: None,
            ranks=mesh,
        )
    )
    runner = loaded.runner
    assert isinstance(runner, PackedRunner)
    held = gauge.now() - gauge.before
    draft = Draft(model="random", prompt="a red circle", width=SIZE, height=SIZE, steps=STEPS, seeds=(1,))
    request = resolve_request(draft, facts_of(config, checkpoint, None), id="job").request
    runner.prepare(request)
    gauge.reset()
    for _ in range(STEPS):
        runner.step([request.id])
    module: nn.Module = runner._pipeline
    return Held(weights=tensors(module), of_blocks=of_blocks(module), loaded=held, step=gauge.above())


def _rank(
    rank: int, folder: Path, meeting: Path, device: str, every: Sequence[ParallelSizes], pipe: Connection
) -> None:
    """Sends what it has in each of the ways that it is a rank of."""
    torch.set_num_threads(1)
    here = torch.device(f"cuda:{rank}" if device == "cuda" else device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if here.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=max(sizes.world for sizes in every),
    )
    # what loading imports is there from then on, and no part of what is measured
    measure(folder, here, None)
    for sizes in every:
        # every process has to be there when groups are made
        mesh = join(sizes, range(sizes.world))
        if rank < sizes.world:
            gc.collect()
            pipe.send(measure(folder, here, mesh if sizes.world > 1 else None))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(folder: Path, device: str, every: Sequence[ParallelSizes]) -> Iterator[list[Held]]:
    """What each rank has, way by way. Raises RuntimeError where one says nothing."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting, contextlib.ExitStack() as started:
        pipes = []
        for rank in range(max(sizes.world for sizes in every)):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, folder, Path(meeting) / "ranks", device, every, theirs), daemon=True
            )
            process.start()
            started.callback(process.join)
            started.callback(process.kill)
            theirs.close()
            pipes.append(mine)
        for sizes in every:
            found = []
            for rank, pipe in enumerate(pipes[: sizes.world]):
                if not pipe.poll(PATIENCE):
                    raise RuntimeError(f"rank {rank} of {sizes.world} has said nothing for {PATIENCE} s")
                found.append(pipe.recv())
            yield found


HEADER = f"{'MiB of a rank':18} ranks {'weights':>8} {'blocks':>8} {'loaded':>8} {'a step':>8}"


def line(way: str, held: Sequence[Held]) -> str:
    """Of the rank that has the most."""
    most = [max(getattr(one, field.name) for one in held) for field in dataclasses.fields(Held)]
    return f"{way:18} {len(held):5} " + " ".join(f"{value / MIB:8.1f}" for value in most)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", default="1,2,4", help="how many, of those that there are devices for")
    parser.add_argument("--layers", type=int, default=12, help="blocks of the transformer")
    parser.add_argument("--heads", type=int, default=4, help="its attention heads, of 128 channels each")
    options = parser.parse_args()
    counts = [int(count) for count in options.ranks.split(",")]
    if options.device == "cuda":
        counts = [count for count in counts if count <= torch.cuda.device_count()]
    from tools.tiny.images import build_qwen_image  # here, since ranks import this module and do not need it

    print(provenance.text("benchmarks/bench_rank_memory.py"))
    with tempfile.TemporaryDirectory() as folder:
        build_qwen_image(Path(folder) / "random", heads=options.heads, head_dim=128, layers=options.layers)
        print(f"{options.layers} blocks of {options.heads} heads, on {options.device}, steps of {SIZE} x {SIZE}\n")
        print(HEADER, flush=True)
        names, every = zip(*ways(counts), strict=True)
        for way, held in zip(names, on_ranks(Path(folder) / "random", options.device, every), strict=True):
            print(line(way, held), flush=True)


if __name__ == "__main__":
    main()
