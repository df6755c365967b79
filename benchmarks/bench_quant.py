"""Times the quant family against what it replaces, eager torch and torch.compile, and against a copy: the ceiling.

    python benchmarks/bench_quant.py             the GPU where there is one, else the CPU
    python benchmarks/bench_quant.py --device cpu

As bench_norm.py does it. `gelu_tanh` eager is torch's one kernel; `silu_mul` eager is F.silu(gate) * up, as diffusers
writes SwiGLU; `beside` is a copy of a fifth of the channels beside GELU of the others.
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

from benchmarks.bench_norm import PASSES, Measurement, eager_quantize, table
from benchmarks.timing import BEYOND_L2, Call, attempt, time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops import quant

F8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Op:
    """`inputs` counts tensors of x's shape; what is coded is written in 8 bits."""

    kernel: Call
    eager: Call
    inputs: int
    coded: bool


def gelu(x: Tensor, up: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def silu_mul(x: Tensor, up: Tensor) -> Tensor:
    return F.silu(x) * up


def halves(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """A fifth of the channels, and the others: what attention and feed-forward have of a parallel block of FLUX.1."""
    kept = x.shape[1] // 40 * 8
    return x[:, :kept], up[:, kept:]


def beside(x: Tensor, up: Tensor) -> Tensor:
    kept, y = halves(x, up)
    return torch.cat([kept, F.gelu(y, approximate="tanh")], 1)


OPS: Mapping[str, Op] = MappingProxyType(
    {
        "gelu_tanh": Op(lambda x, up: quant.gelu_tanh(x), gelu, 1, coded=False),
        "silu_mul": Op(quant.silu_mul, silu_mul, 2, coded=False),
        "quantize_rows": Op(lambda x, up: quant.quantize_rows(x, F8), lambda x, up: eager_quantize(x), 1, coded=True),
        "quantize_rows int8": Op(
            lambda x, up: quant.quantize_rows(x, torch.int8), lambda x, up: eager_quantize(x), 1, coded=True
        ),
        "gelu_tanh_quantize_rows": Op(
            lambda x, up: quant.gelu_tanh_quantize_rows(x, False),
            lambda x, up: eager_quantize(gelu(x, up)),
            1,
            coded=True,
        ),
        "silu_mul_quantize_rows": Op(
            lambda x, up: quant.silu_mul_quantize_rows(x, up, False),
            lambda x, up: eager_quantize(silu_mul(x, up)),
            2,
            coded=True,
        ),
        "concat_gelu_tanh": Op(lambda x, up: quant.concat_gelu_tanh(*halves(x, up)), beside, 1, coded=False),
        "concat_gelu_tanh_quantize_rows": Op(
            lambda x, up: quant.concat_gelu_tanh_quantize_rows(*halves(x, up), False),
            lambda x, up: eager_quantize(beside(x, up)),
            1,
            coded=True,
        ),
    }
)

GPU_SHAPES = ((4608, 3072), (4608, 12288), (4128, 10240), (32760, 13824))
"""Tokens and channels: the width of FLUX and of the inside of its feed-forward, that of Z-Image and of Wan 14B."""

CPU_SHAPES = ((64, 352), (260, 352), (1024, 2048), (4128, 10240))


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def measure(
    device: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every op at every shape, in the order of PASSES: nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    made: dict[tuple[Any, ...], Measurement] = {}
    passes = PASSES if device == "cuda" else PASSES[:2]
    for names, shape in itertools.product(passes, shapes):
        if time.monotonic() > deadline:
            break
        sets = _input_sets(device, *shape, dtype)
        for (op, part), what in itertools.product(OPS.items(), names):
            made[(op, shape, what)] = _measured(op, part, what, sets, deadline)
        del sets
    keys = itertools.product(OPS, shapes, ("copy", "eager", "compile", "kernel"))
    return [made[key] for key in keys if key in made]


def _measured(op: str, part: Op, what: str, sets: list[tuple[Tensor, Tensor]], deadline: float) -> Measurement:
    x = sets[0][0]
    moved = x.nbytes * part.inputs + (x.numel() if part.coded else x.nbytes)
    call = part.kernel if what == "kernel" else part.eager
    if what == "copy":
        call, moved = _copy, 2 * x.nbytes
    elif what == "compile":
        torch.compiler.reset()
        call = torch.compile(part.eager, dynamic=False, fullgraph=True)
    taken, problem = None, "no time left"
    if time.monotonic() < deadline:
        taken, problem = attempt(time_on_gpu if x.is_cuda else time_on_cpu, call, sets)
    return Measurement(
        op=op,
        tokens=x.shape[0],
        channels=x.shape[1],
        rows=1,
        dtype=str(x.dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        gb_per_s=None if taken is None else moved / taken / 1e9,
        problem=problem,
    )


def _copy(x: Tensor, up: Tensor) -> Tensor:
    return x.clone()


def _input_sets(device: str, tokens: int, channels: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    count = max(2, math.ceil(BEYOND_L2 / (2 * tokens * channels * dtype.itemsize))) if device == "cuda" else 1
    return [
        (
            torch.randn(tokens, channels, device=device, dtype=dtype),
            torch.randn(tokens, channels, device=device, dtype=dtype),
        )
        for _ in range(count)
    ]


def main() -> None:
    parser = Parser(description="time the quant family against eager torch and torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    if parser.parse_args().device == "cuda":
        print(table(gpu(math.inf)))
        return
    for dtype in (torch.float32, torch.bfloat16):
        print(table(measure("cpu", CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
