"""Times weights that leave the device and come back: a denoiser as large as Qwen-Image's, 41 GB in bfloat16.

    python -m benchmarks.bench_residency [--seconds 420] [--results FOLDER]     on a GPU with 60 GB, and 100 GB of host

Weights are random. "copy" is the ceiling: one copy of pinned memory; "plain" is what torch does with tensors of some
blocks by itself. "sleep" and "wake" are a worker's orders. "step" is one denoising step of 1024 x 1024 with guidance,
launches and all; "budget" is the same step with what a memory budget leaves on the device, and that budget as the limit
of the allocator. "with encoders out" is a step while a staged encoder is away, "while one comes" one while another
thread fetches it over and over.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bench_models, timing
from omni_grpc.config import OffloadConfig
from omni_grpc.config.command_line import Parser
from omni_grpc.features import Context, layerwise_offload
from omni_grpc.nn.stack import Stack, main_stack
from omni_grpc.ops.host import Region
from omni_grpc.resolve.residency import GIB, STEP_FLOOR, DenoiserSize, ModelSizes, plan_residency
from omni_grpc.worker.base import LoadedModel
from omni_grpc.worker.device_memory import CudaMemory
from omni_grpc.worker.phases import Staging
from omni_grpc.worker.residency import Residency

DEVICE = bench_models.DEVICE
CASE = next(case for case in bench_models.CASES if case.name == "Qwen-Image")
BF16 = bench_models.WAYS[0]
BUDGETS = (80, 48, 40, 32, 24, 16, 8, 4)
"""GiB. The first one has room for all."""
ENCODER_BYTES = 6 * GIB
PLAIN_BLOCKS = 6
STEPS = 5
STEP_WORK = STEP_FLOOR + GIB // 2
"""Bytes that a step of two rows of 4352 tokens works with, as the planner estimates it."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb`: what moved or is held, in powers of 1000; `note`: what was planned, or whether bits are the same."""

    what: str
    seconds: float | None = None
    gb: float | None = None
    note: str = ""
    problem: str = ""
    runs: Sequence[float] = ()


def measure(seconds: float) -> Iterator[Measurement]:
    """Nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    memory = CudaMemory(DEVICE)
    yield from _tried("copy", _ceiling)
    resident: dict[str, Any] = {}
    yield from _tried("build", lambda: _build(resident))
    if not resident:
        return
    for what, call in (
        ("step", lambda: _steps(resident, "step, no budget")),
        ("budget", lambda: _under(resident, memory)),
        ("encoders", lambda: _beside_an_encoder(resident, memory)),
        ("plain", lambda: _plain(resident)),
        ("sleep", lambda: _sleeps(resident, memory)),
    ):
        if time.monotonic() > deadline:
            yield Measurement(what, problem="no time left")
            continue
        yield from _tried(what, call)
    resident.clear()
    for budget in BUDGETS[1:]:
        name = f"budget {budget} GiB"
        if time.monotonic() > deadline:
            yield Measurement(name, problem="no time left")
            continue
        yield from _tried(name, lambda budget=budget: _offloaded(budget, memory))
    memory.limit(torch.cuda.get_device_properties(DEVICE).total_memory)


def _tried(what: str, call: Callable[[], Sequence[Measurement]]) -> Iterator[Measurement]:
    """What a part measured; a part that fails is a row, and the others still count."""
    gc.collect()
    torch.cuda.empty_cache()
    began = time.monotonic()
    try:
        made = call()
    except Exception as error:  # noqa: BLE001 - as above
        made = [Measurement(what, problem=f"{type(error).__name__}: {str(error)[:200]}")]
    print(f"[{time.monotonic() - began:5.1f} s] {what}", file=sys.stderr, flush=True)
    yield from made


def _clock(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _ceiling() -> list[Measurement]:
    region = Region(GIB)
    source = region.take((GIB,), torch.uint8)
    source.zero_()
    region.pin(DEVICE)
    target = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    runs = [_clock(lambda: target.copy_(source, non_blocking=True)) for _ in range(6)][1:]
    back = [_clock(lambda: source.copy_(target, non_blocking=True)) for _ in range(6)][1:]
    return [
        Measurement("copy to the device", statistics.median(runs), GIB / 1e9, runs=runs),
        Measurement("copy from the device", statistics.median(back), GIB / 1e9, runs=back),
    ]


def _build(resident: dict[str, Any]) -> list[Measurement]:
    made: list[nn.Module] = []
    taken = _clock(lambda: made.append(bench_models._built(CASE, BF16)[0]))
    step = _step(made[0])
    result = step().clone()
    note = "steps repeat bit for bit" if torch.equal(step(), result) else "steps DO NOT repeat bit for bit"
    size = sum(parameter.nbytes for parameter in made[0].parameters())
    resident.update(module=made[0], step=step, result=result, bytes=size)
    return [Measurement("build with random weights", taken, size / 1e9, note)]


def _step(module: nn.Module) -> Callable[[], Tensor]:
    """A step as a worker takes it."""
    with torch.inference_mode():
        step = CASE.ours(module)
    call: Callable[[], Tensor] = torch.inference_mode()(step)
    return call


def _taken(step: Callable[[], Tensor], count: int = STEPS) -> list[float]:
    """Seconds of each step."""
    for _ in range(2):
        step()
    return [bench_models._milliseconds(step) / 1e3 for _ in range(count)]


def _steps(resident: dict[str, Any], what: str) -> list[Measurement]:
    runs = _taken(resident["step"])
    return [Measurement(what, statistics.median(runs), resident["bytes"] / 1e9, runs=runs)]


def _under(resident: dict[str, Any], memory: CudaMemory) -> list[Measurement]:
    """The whole model under the largest budget, in turns with none."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    plan = plan_residency(_sizes(resident["module"]), BUDGETS[0] * GIB)
    assert plan.resident_blocks is None, "the largest budget is for all"
    runs: dict[int, list[float]] = {total: [], BUDGETS[0] * GIB: []}
    for turn in range(4):
        for limit in runs if turn % 2 else reversed(runs):
            memory.limit(limit)
            runs[limit] += _taken(resident["step"], 3)
    memory.limit(total)
    free, limited = (statistics.median(some) for some in runs.values())
    note = f"all resident; {limited / free - 1:+.2%} against no budget in turns"
    return [
        Measurement(f"budget {BUDGETS[0]} GiB", limited, resident["bytes"] / 1e9, note, runs=runs[BUDGETS[0] * GIB])
    ]


def _sizes(module: nn.Module) -> ModelSizes:
    """The denoiser as the planner sees it."""
    _, stack = main_stack(module)
    blocks = [sum(p.numel() * 2 for p in block.parameters() if p.dim() == 2) for block in _blocks(stack)]
    whole = sum(p.numel() * 2 for p in module.parameters())
    denoiser = DenoiserSize(name="transformer", fixed=whole - sum(blocks), stacks=(tuple(blocks),))
    return ModelSizes(denoisers=(denoiser,), parts=(), step=STEP_WORK)


def _blocks(stack: Stack) -> list[nn.Module]:
    return [block for group in stack.groups for block in stack.group(group)]


def _offloaded(budget: int, memory: CudaMemory) -> list[Measurement]:
    """A model of its own, loaded and run under the budget."""
    with torch.device("meta"):
        sizes = _sizes(CASE.build())
    plan = plan_residency(sizes, budget * GIB)
    memory.limit(budget * GIB)
    before: list[Any] = []
    if (count := plan.resident_blocks) is not None:
        settings = OffloadConfig(enable_layerwise_offload=True, layerwise_resident_blocks=count)

        def edit(module: nn.Module, _: None, context: Context) -> None:
            layerwise_offload.apply(module, settings, context)

        before.append(edit)
    module, _ = bench_models._built(CASE, BF16, before=before)
    torch.cuda.empty_cache()
    step = _step(module)
    torch.cuda.reset_peak_memory_stats()
    # the first step pins the blocks
    first = _clock(step)
    runs = _taken(step)
    peak = torch.cuda.max_memory_reserved() / GIB
    note = f"{plan.describe(sizes, budget * GIB)}; {peak:.1f} GiB reserved at most; first step {first:.1f} s"
    return [Measurement(f"budget {budget} GiB", statistics.median(runs), plan.resident / 1e9, note, runs=runs)]


class _Encoder(nn.Module):
    """Layers in a row, as large as ENCODER_BYTES."""

    def __init__(self, width: int = 8192) -> None:
        super().__init__()
        layers = ENCODER_BYTES // (2 * width * width)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _beside_an_encoder(resident: dict[str, Any], memory: CudaMemory) -> list[Measurement]:
    with torch.device("meta"):
        encoder: nn.Module = _Encoder().requires_grad_(False)
    encoder = encoder.to_empty(device="cpu")
    for parameter in encoder.parameters():
        parameter.data.zero_()
    staging = Staging(memory)
    staging.take("text_encoder", encoder)
    x = torch.zeros(16, 8192, dtype=torch.bfloat16, device=DEVICE)
    with torch.inference_mode(), staging.phase():
        encoder(x)
    torch.cuda.synchronize()
    out = _steps(resident, "step with encoders out")
    stop, fetched = threading.Event(), []

    def prepare() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                began = time.perf_counter()
                with staging.phase():
                    encoder(x)
                fetched.append(time.perf_counter() - began)

    thread = threading.Thread(target=prepare)
    thread.start()
    try:
        runs = _taken(resident["step"], 3 * STEPS)
    finally:
        stop.set()
        thread.join()
    return [
        *out,
        Measurement("step while one comes", statistics.median(runs), resident["bytes"] / 1e9, runs=runs),
        Measurement("an encoder comes, runs and goes", statistics.median(fetched), ENCODER_BYTES / 1e9, runs=fetched),
    ]


def _plain(resident: dict[str, Any]) -> list[Measurement]:
    """The tensors of the first blocks, by torch alone."""
    blocks = _blocks(main_stack(resident["module"])[1])[:PLAIN_BLOCKS]
    tensors = [parameter.detach() for block in blocks for parameter in block.parameters()]
    size, note = sum(tensor.nbytes for tensor in tensors) / 1e9, f"{PLAIN_BLOCKS} blocks by tensor.to()"
    hosts: list[Tensor] = []
    away = _clock(lambda: hosts.extend(tensor.to("cpu") for tensor in tensors))
    back = _clock(lambda: [host.to(DEVICE) for host in hosts])
    return [Measurement("plain sleep", away, size, note), Measurement("plain wake", back, size, note)]


def _sleeps(resident: dict[str, Any], memory: CudaMemory) -> list[Measurement]:
    runner: Any = SimpleNamespace()
    loaded = LoadedModel(runner=runner, weight_bytes=0, components={"transformer": resident["module"]})
    residency, made = Residency(loaded, DEVICE, memory), []
    size = residency.device_bytes / 1e9
    for number in ("first", "second", "third"):
        before = torch.cuda.mem_get_info(DEVICE)[0]
        freed: list[int] = []
        taken = _clock(lambda freed=freed: freed.append(residency.sleep()))
        really = torch.cuda.mem_get_info(DEVICE)[0] - before
        note = f"freed {freed[0] / 1e9:.1f} GB, the driver says {really / 1e9:.1f}"
        made.append(Measurement(f"{number} sleep", taken, size, note))
        taken = _clock(residency.wake)
        same = torch.equal(resident["step"](), resident["result"])
        made.append(Measurement(f"{number} wake", taken, size, "same bits" if same else "OTHER BITS"))
    return made


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'what':32} {'s':>9} {'GB':>7} {'GB/s':>7}"]
    for m in measurements:
        if m.seconds is None:
            lines.append(f"{m.what:32} {m.problem}")
            continue
        moves = m.gb is not None and not m.what.startswith(("step", "budget"))
        speed = f"{m.gb / m.seconds:7.1f}" if moves and m.gb is not None else " " * 7
        held = " " * 7 if m.gb is None else f"{m.gb:7.1f}"
        lines.append(f"{m.what:32} {m.seconds:9.4f} {held} {speed} {m.note}")
    return "\n".join(lines)


def options_of(description: str) -> argparse.Namespace:
    parser = Parser(description=description)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    return parser.parse_args()


def main() -> None:
    options = options_of("time weights that leave the device and come back")
    timing.require_gpu()
    made = measure(options.seconds)
    print(table(timing.recorded("benchmarks/bench_residency.py", "residency", made, options.results)))


if __name__ == "__main__":
    main()
