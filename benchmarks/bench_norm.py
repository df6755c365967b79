"""Times the norm family against what it replaces, eager torch and torch.compile, and against a copy: the ceiling.

    python benchmarks/bench_norm.py             the GPU where there is one, else the CPU
    python benchmarks/bench_norm.py --device cpu

On a GPU a measurement is a CUDA graph of CALLS calls, timed with events: the device's time alone, without the host's.
The inputs rotate through more memory than the L2 cache holds, and every call has an output of its own. `eager` is what
diffusers writes for that part of a block, with the modulation gathered for each token.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import BEYOND_L2, Call, attempt, time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops import norm

EPS = 1e-6
F8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Of one call. The modulation is six slices of one row, as models have it; exact_mod is in float32, as in Wan."""

    x: Tensor
    y: Tensor
    mod: tuple[Tensor, ...]
    exact_mod: tuple[Tensor, ...]
    weight: Tensor
    index: Tensor


@dataclasses.dataclass(frozen=True)
class Op:
    """`reads` and `writes` count tensors of x's shape, `codes` whether one is written in 8 bits besides."""

    kernel: Call
    eager: Call
    reads: int
    writes: int
    codes: bool = False


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb_per_s` counts each input read once and the output written once. `problem` says why there is no time."""

    op: str
    tokens: int
    channels: int
    rows: int
    dtype: str
    what: str
    microseconds: float | None
    gb_per_s: float | None
    problem: str = ""


# --- what is timed ----------------------------------------------------------------------------------------------------


def gathered(i: Inputs, *numbers: int) -> list[Tensor]:
    """A packed batch gathers the modulation for each token, a single row broadcasts it."""
    tables = [i.mod[number] for number in numbers]
    return tables if tables[0].shape[0] == 1 else [table.index_select(0, i.index) for table in tables]


def eager_norm_modulate(i: Inputs) -> Tensor:
    scale, shift = gathered(i, 0, 1)
    return F.layer_norm(i.x, (i.x.shape[1],), eps=EPS) * (1 + scale) + shift


def eager_gate_add(i: Inputs) -> Tensor:
    (gate,) = gathered(i, 2)
    return i.x + gate * i.y


def eager_gate_add_norm_modulate(i: Inputs) -> tuple[Tensor, Tensor]:
    total = eager_gate_add(i)
    return total, eager_norm_modulate(dataclasses.replace(i, x=total))


def eager_add_norm_exactly(i: Inputs) -> tuple[Tensor, Tensor]:
    total = i.x + i.y
    scale, shift = gathered(dataclasses.replace(i, mod=i.exact_mod), 0, 1)
    return total, (F.layer_norm(total.float(), (i.x.shape[1],), eps=EPS) * (1 + scale) + shift).to(i.x.dtype)


def eager_sandwich(i: Inputs) -> tuple[Tensor, Tensor]:
    shape, (gate, scale) = (i.x.shape[1],), gathered(i, 2, 0)
    total = i.x + gate * F.rms_norm(i.y, shape, i.weight, EPS)
    return total, F.rms_norm(total, shape, i.weight, EPS) * scale


def eager_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / 448
    return (x / scale.clamp_min(1e-12)).clamp(-448, 448).to(F8), scale


OPS: Mapping[str, Op] = MappingProxyType(
    {
        "norm_modulate": Op(
            lambda i: norm.norm_modulate(i.x, i.mod[0], i.mod[1], i.index, EPS), eager_norm_modulate, 1, 1
        ),
        "norm_modulate_quantize": Op(
            lambda i: norm.norm_modulate_quantize(i.x, i.mod[0], i.mod[1], i.index, EPS, int8=False),
            lambda i: eager_quantize(eager_norm_modulate(i)),
            1,
            0,
            codes=True,
        ),
        "gate_add": Op(lambda i: norm.gate_add(i.x, i.y, i.mod[2], i.index), eager_gate_add, 2, 1),
        "gate_add_norm_modulate": Op(
            lambda i: norm.gate_add_norm_modulate(i.x, i.y, i.mod[2], i.mod[0], i.mod[1], i.index, EPS),
            eager_gate_add_norm_modulate,
            2,
            2,
        ),
        "gate_add_norm_modulate_quantize": Op(
            lambda i: norm.gate_add_norm_modulate_quantize(
                i.x, i.y, i.mod[2], i.mod[0], i.mod[1], i.index, EPS, int8=False
            ),
            lambda i: (
                total := eager_gate_add(i),
                *eager_quantize(eager_norm_modulate(dataclasses.replace(i, x=total))),
            ),
            2,
            1,
            codes=True,
        ),
        "gate_add_norm_modulate, no gate, float32 modulation": Op(
            lambda i: norm.gate_add_norm_modulate(i.x, i.y, None, i.exact_mod[0], i.exact_mod[1], i.index, EPS),
            eager_add_norm_exactly,
            2,
            2,
        ),
        "sandwich": Op(
            lambda i: norm.gate_add_norm_modulate(
                i.x, i.y, i.mod[2], i.mod[0], None, i.index, EPS, weight=i.weight, rms=True, base=0.0, y_weight=i.weight
            ),
            eager_sandwich,
            2,
            2,
        ),
    }
)
"""`sandwich` is gate_add_norm_modulate with RMS norms before and after the sum, as Z-Image's blocks have them."""

GPU_SHAPES = ((4608, 3072, 1), (9216, 3072, 2), (4128, 3840, 1), (32760, 5120, 2), (32760, 1536, 1))
"""Tokens, channels and rows: FLUX and Qwen-Image at 1024 x 1024 (one row, two rows), Z-Image at 1024 x 1024, Wan 14B
and 1.3B at 480p and 81 frames."""

CPU_SHAPES = ((64, 128, 1), (260, 128, 3), (1024, 1536, 2), (4608, 3072, 2))


# --- timing -----------------------------------------------------------------------------------------------------------


PASSES = (("copy", "kernel"), ("eager",), ("compile",))
"""What is timed at every shape before the next is at any: torch.compile last, as it takes longest."""


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def measure(
    device: str, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every op at every shape, in the order of PASSES: nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    made: dict[tuple[Any, ...], Measurement] = {}
    passes = PASSES if device == "cuda" else PASSES[:2]
    for names, shape in itertools.product(passes, shapes):
        if time.monotonic() > deadline:
            break
        sets = input_sets(device, *shape, dtype)
        for (op, part), what in itertools.product(OPS.items(), names):
            made[(op, shape, what)] = _measured(op, part, shape, what, sets, deadline)
        del sets
    order = ("copy", "eager", "compile", "kernel")
    keys = itertools.product(OPS, shapes, order)
    return [made[key] for key in keys if key in made]


def _measured(
    op: str, part: Op, shape: tuple[int, int, int], what: str, sets: list[Inputs], deadline: float
) -> Measurement:
    first = sets[0]
    moved = first.x.nbytes * (part.reads + part.writes) + first.x.numel() * part.codes
    if what == "copy":
        call, moved = copy, 2 * first.x.nbytes
    elif what == "compile":
        torch.compiler.reset()
        call = torch.compile(part.eager, dynamic=False, fullgraph=True)
    else:
        call = part.kernel if what == "kernel" else part.eager
    taken, problem = None, "no time left"
    if time.monotonic() < deadline:
        timer = time_on_gpu if first.x.is_cuda else time_on_cpu
        taken, problem = attempt(timer, call, [(inputs,) for inputs in sets])
    return Measurement(
        op=op,
        tokens=shape[0],
        channels=shape[1],
        rows=shape[2],
        dtype=str(first.x.dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        gb_per_s=None if taken is None else moved / taken / 1e9,
        problem=problem,
    )


def copy(i: Inputs) -> Tensor:
    return i.x.clone()


def input_sets(device: str, tokens: int, channels: int, rows: int, dtype: torch.dtype) -> list[Inputs]:
    count = max(2, math.ceil(BEYOND_L2 / (2 * tokens * channels * dtype.itemsize))) if device == "cuda" else 1
    index = (torch.arange(tokens, device=device) * rows // tokens).int()
    return [
        Inputs(
            x=torch.randn(tokens, channels, device=device).to(dtype),
            y=torch.randn(tokens, channels, device=device).to(dtype),
            mod=torch.randn(rows, 6 * channels, device=device).to(dtype).chunk(6, -1),
            exact_mod=torch.randn(rows, 6 * channels, device=device).chunk(6, -1),
            weight=torch.randn(channels, device=device).to(dtype),
            index=index,
        )
        for _ in range(count)
    ]


def table(measurements: Sequence[Any]) -> str:
    """A row for each shape and candidate; `speedup` is eager's time over this one's."""
    head = f"{'shape':>12} {'rows':>4} {'dtype':>8}  {'what':8} {'us':>9} {'GB/s':>7} {'of copy':>8} {'speedup':>8}"
    lines = []
    for op, by_op in itertools.groupby(measurements, lambda m: m.op):
        lines += [op, head]
        for _, group in itertools.groupby(by_op, lambda m: (m.tokens, m.channels, m.rows)):
            by_name = {m.what: m for m in group}
            for m in by_name.values():
                start = f"{f'{m.tokens}x{m.channels}':>12} {m.rows:>4} {m.dtype:>8}  {m.what:8}"
                if m.microseconds is None or m.gb_per_s is None:
                    lines.append(f"{start} {m.problem}")
                    continue
                ceiling, base = by_name["copy"].gb_per_s, by_name["eager"].microseconds if "eager" in by_name else None
                of_copy = f"{m.gb_per_s / ceiling:8.0%}" if ceiling else f"{'-':>8}"
                speedup = f"{base / m.microseconds:7.2f}x" if base else f"{'-':>8}"
                lines.append(f"{start} {m.microseconds:9.1f} {m.gb_per_s:7.0f} {of_copy} {speedup}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time the norm family against eager torch and torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    if parser.parse_args().device == "cuda":
        print(table(gpu(math.inf)))
        return
    for dtype in (torch.float32, torch.bfloat16):
        print(table(measure("cpu", CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
