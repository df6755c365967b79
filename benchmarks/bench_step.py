"""Times guide_step against the eager operators that it replaces, state by state, and counts their launches.

    python benchmarks/bench_step.py             the GPU where there is one, else the CPU
    python benchmarks/bench_step.py --device cpu

`host` is the time from the first call to the last launch, as a step has it; `device` is that of a CUDA graph. Both with
the check for values that are not finite.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import attempt, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.step import GuidanceNormCode, OutputStep, guide, guide_step

GPU_SHAPES = ((1, 4096, 64), (8, 4096, 64), (1, 32760, 64))
"""Outputs, tokens and channels: one and eight pictures of 1024 x 1024, and a video of 81 frames at 480p."""

CPU_SHAPES = ((1, 64, 64), (3, 256, 64), (1, 4096, 64))
KINDS = ("plain", "cfg", "renorm", "rescale")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`launches` are the operators that do work on the device, of one call."""

    outputs: int
    tokens: int
    channels: int
    kind: str
    dtype: str
    what: str
    launches: int | None
    host_us: float | None
    device_us: float | None
    problem: str = ""


def moves(outputs: int, tokens: int, kind: str) -> list[OutputStep]:
    branches = 1 if kind == "plain" else 2
    return [
        OutputStep(
            cond=branches * number * tokens,
            uncond=None if kind == "plain" else (branches * number + 1) * tokens,
            latents=branches * number * tokens,
            tokens=tokens,
            width=-0.02,
            scale=4.0,
            rescale=0.7 if kind == "rescale" else 0.0,
            norm=GuidanceNormCode.RENORM if kind == "renorm" else GuidanceNormCode.NONE,
        )
        for number in range(outputs)
    ]


def eager(prediction: Tensor, latents: Tensor, steps: Sequence[OutputStep]) -> Tensor:
    """As guidance, diffusers' Euler step and the check do it without the op."""
    flags = []
    for move in steps:
        guided = prediction[move.cond : move.cond + move.tokens]
        if move.uncond is not None:
            uncond = prediction[move.uncond : move.uncond + move.tokens]
            guided = guide(guided, uncond, move.scale, move.rescale, move.norm)
        before = latents[move.latents : move.latents + move.tokens].to(torch.float32)
        flags.append((before + move.width * guided).to(prediction.dtype).isfinite().all())
    return torch.stack(flags)


def kernel(prediction: Tensor, latents: Tensor, steps: Sequence[OutputStep]) -> Tensor:
    return guide_step(prediction, latents, steps).nonfinite


class Launches(TorchDispatchMode):
    """Counts operators that are no views and no allocations."""

    FREE = ("aten.slice", "aten.split", "aten.view", "aten.empty", "aten.new_empty", "aten.unbind", "aten.select")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # the op zeroes its flags, and what is rescaled is measured first; a cast to the same dtype is not dispatched
        self.count += not str(func).startswith(self.FREE)
        return func(*args, **(kwargs or {}))


def measure(
    device: str, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """The kernel at every shape and kind, then eager: nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    made: dict[tuple[Any, ...], Measurement] = {}
    for what, shape, kind in itertools.product(("kernel", "eager"), shapes, KINDS):
        if time.monotonic() > deadline:
            break
        made[(shape, kind, what)] = _measured(what, shape, kind, device, dtype)
    return [made[key] for key in itertools.product(shapes, KINDS, ("eager", "kernel")) if key in made]


def _measured(what: str, shape: tuple[int, int, int], kind: str, device: str, dtype: torch.dtype) -> Measurement:
    outputs, tokens, channels = shape
    call = kernel if what == "kernel" else eager
    steps = moves(outputs, tokens, kind)
    total = tokens * outputs * (1 if kind == "plain" else 2)
    sets = [(*torch.randn(2, total, channels, device=device).to(dtype).unbind(), steps) for _ in range(4)]
    launches = _launches(call, sets[0], kind)
    host, problem = attempt(_time_host, call, sets)
    on_device = None
    if device == "cuda":
        on_device, problem = attempt(time_on_gpu, call, sets)
    return Measurement(
        outputs=outputs,
        tokens=tokens,
        channels=channels,
        kind=kind,
        dtype=str(dtype).removeprefix("torch."),
        what=what,
        launches=launches,
        host_us=None if host is None else host * 1e6,
        device_us=None if on_device is None else on_device * 1e6,
        problem=problem,
    )


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def _launches(call: Callable[..., Tensor], inputs: tuple[Any, ...], kind: str) -> int:
    with Launches() as counted:
        call(*inputs)
    if call is kernel:
        # one operator: the zeroes of its flags, the measuring of what is rescaled, and itself
        return counted.count + 1 + (kind == "rescale")
    return counted.count


def _time_host(call: Callable[..., Tensor], sets: Sequence[tuple[Any, ...]]) -> float:
    times = []
    for number in range(33):
        if sets[0][0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(*sets[number % len(sets)])
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        f"{'outputs':>7} {'shape':>9} {'kind':>8} {'dtype':>8}  {'what':7} {'launches':>8} {'host us':>9} "
        f"{'device us':>9}"
    ]
    for m in measurements:
        head = f"{m.outputs:>7} {f'{m.tokens}x{m.channels}':>9} {m.kind:>8} {m.dtype:>8}  {m.what:7}"
        if m.host_us is None:
            lines.append(f"{head} {m.problem}")
            continue
        on_device = f"{m.device_us:9.1f}" if m.device_us is not None else f"{m.problem or '-':>9}"
        lines.append(f"{head} {m.launches:>8} {m.host_us:9.1f} {on_device}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time guide_step against eager torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        print(table(measure(device, GPU_SHAPES if device == "cuda" else CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
