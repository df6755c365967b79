"""Times the image family against what it replaces: eager torch and torch.compile.

    python benchmarks/bench_image.py             the GPU where there is one, else the CPU
    python benchmarks/bench_image.py --device cpu

Measured as bench_norm measures. A copy of half of what moves, read and written, is the ceiling.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_norm import PASSES
from benchmarks.timing import BEYOND_L2, attempt, time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.image import latents_to_bytes, pixels_to_bytes

PIXELS = {"cuda": ((1, 1024, 1024), (81, 480, 832)), "cpu": ((1, 128, 128), (1, 1024, 1024))}
"""[count, height, width]: an image, a video of Wan's."""

LATENTS = {"cuda": ((16, 128, 128),), "cpu": ((16, 16, 16), (16, 128, 128))}
"""[channels, height, width] of a preview."""

BIAS = (0.1, -0.2, 0.3)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb_per_s` counts pixels or latents read once and bytes written once."""

    op: str
    shape: str
    dtype: str
    what: str
    microseconds: float | None
    gb_per_s: float | None
    problem: str = ""


def eager_pixels(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """What the pipelines did."""
    finite = torch.isfinite(pixels).all()
    unit = (pixels * 0.5 + 0.5).clamp(0, 1).float()
    return (unit * 255).round().to(torch.uint8).movedim(-3, -1).contiguous(), finite


def factors_of(latents: Tensor) -> list[float]:
    return [0.01 * i for i in range(3 * len(latents))]


def eager_latents(latents: Tensor) -> Tensor:
    """What previews did, with the map already on the device."""
    factors = torch.arange(3 * len(latents), device=latents.device).view(-1, 3) * 0.01
    bias = torch.ones(3, device=latents.device)
    unit = (torch.einsum("chw,cr->rhw", latents.float(), factors) + bias[:, None, None]) / 2 + 0.5
    pixels = unit.nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    return pixels.permute(1, 2, 0).contiguous()


def copy(x: Tensor) -> Tensor:
    """As many bytes read as written, as many in all as the op moves."""
    moved = x.numel() * (x.element_size() + 1) // 2 if x.dim() == 4 else x.nbytes // 2
    return x.flatten().view(torch.uint8)[:moved].clone()


OPS: dict[str, dict[str, Callable[[Tensor], object]]] = {
    "pixels": {"copy": copy, "eager": eager_pixels, "kernel": pixels_to_bytes},
    "latents": {
        "copy": copy,
        "eager": eager_latents,
        "kernel": lambda latents: latents_to_bytes(latents, factors_of(latents), BIAS),
    },
}


def measure(device: str, dtypes: Sequence[torch.dtype], *, seconds: float = math.inf) -> list[Measurement]:
    """Every candidate at every shape, in the order of PASSES: nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    shapes = [("pixels", (count, 3, height, width)) for count, height, width in PIXELS[device]]
    shapes += [("latents", shape) for shape in LATENTS[device]]
    passes = PASSES if device == "cuda" else PASSES[:2]
    made: dict[tuple[Any, ...], Measurement] = {}
    for names, dtype, (op, size) in itertools.product(passes, dtypes, shapes):
        if time.monotonic() > deadline:
            break
        nbytes = math.prod(size) * dtype.itemsize
        count = max(2, math.ceil(BEYOND_L2 / nbytes)) if device == "cuda" and op == "pixels" else 1
        sets = [(torch.randn(size, device=device).to(dtype),) for _ in range(count)]
        for what in names:
            made[(dtype, op, size, what)] = _measured(op, what, sets, deadline)
        del sets
    keys = itertools.product(dtypes, shapes, ("copy", "eager", "compile", "kernel"))
    return [made[key] for key in ((dtype, *shape, what) for dtype, shape, what in keys) if key in made]


def _measured(op: str, what: str, sets: list[tuple[Tensor]], deadline: float) -> Measurement:
    x = sets[0][0]
    if what == "compile":
        torch.compiler.reset()
        call = torch.compile(OPS[op]["eager"], dynamic=False, fullgraph=True)
    else:
        call = OPS[op][what]
    taken, problem = None, "no time left"
    if time.monotonic() < deadline:
        taken, problem = attempt(time_on_gpu if x.is_cuda else time_on_cpu, call, sets)
    moved = x.nbytes + 3 * x.shape[-2] * x.shape[-1] * (x.shape[0] if op == "pixels" else 1)
    return Measurement(
        op=op,
        shape="x".join(map(str, x.shape)),
        dtype=str(x.dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        gb_per_s=None if taken is None else moved / taken / 1e9,
        problem=problem,
    )


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", (torch.bfloat16, torch.float32), seconds=seconds)


def table(measurements: Sequence[Measurement]) -> str:
    """A row for each shape and candidate; `speedup` is eager's time over this one's."""
    lines = [f"{'op and shape':>24} {'dtype':>8}  {'what':8} {'us':>9} {'GB/s':>7} {'of copy':>8} {'speedup':>8}"]
    for _, group in itertools.groupby(measurements, lambda m: (m.op, m.shape, m.dtype)):
        by_name = {m.what: m for m in group}
        for m in by_name.values():
            head = f"{f'{m.op} {m.shape}':>24} {m.dtype:>8}  {m.what:8}"
            if m.microseconds is None or m.gb_per_s is None:
                lines.append(f"{head} {m.problem}")
                continue
            ceiling, base = by_name["copy"].gb_per_s, by_name["eager"].microseconds if "eager" in by_name else None
            of_copy = f"{m.gb_per_s / ceiling:8.0%}" if ceiling else f"{'-':>8}"
            speedup = f"{base / m.microseconds:7.2f}x" if base else f"{'-':>8}"
            lines.append(f"{head} {m.microseconds:9.1f} {m.gb_per_s:7.0f} {of_copy} {speedup}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time the image family against eager torch and torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    print(table(measure(device, (torch.bfloat16, torch.float32))))


if __name__ == "__main__":
    main()
