"""Times the gemm family against torch's products: bfloat16, float8 and int8, with and without what follows them.

    python benchmarks/bench_gemm.py             the GPU where there is one, else the CPU
    python benchmarks/bench_gemm.py --device cpu

As bench_norm.py does it. The rows of a shape:
    bf16, bf16 bias            F.linear
    _scaled_mm                 float8 by row and column, without bias; the ceiling of what cuBLASLt gives here
    _scaled_mm + bias, + gelu  the same and what follows, each an operator of torch
    _scaled_mm(bias)           with the bias in cuBLASLt's own epilogue
    _int_mm                    int8 to int32, which nobody can use as it is
    fp8 ..., int8 ...          ours, from codes and scales to the layer's output, with each epilogue
    linear fp8, linear int8    ours with the quantisation of the tokens before it: the whole layer
TFLOP/s count 2 T N K, whatever the dtype. Ours goes the way that ops.tuning has for the shape. On the CPU fp32 stands
beside bf16, as torch computes it and as our layers do, and beside int8 what defines the op, by torch's operators.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import BEYOND_L2, CALLS, attempt, time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.gemm import gemm_q
from omni_grpc.ops.linear import linear
from omni_grpc.ops.quant import quantize_rows

F8, I8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`teraflops`: 2 T N K over the time. `problem` says why there is none."""

    tokens: int
    outputs: int
    inputs: int
    what: str
    microseconds: float | None
    teraflops: float | None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Operands:
    """Of one call: x and weight in full precision, and the codes and scales of both by dtype."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    coded: Mapping[torch.dtype, tuple[Tensor, Tensor, Tensor, Tensor]]


def ours(codes: torch.dtype, biased: bool, act: str, i: Operands) -> Tensor:
    return gemm_q(*i.coded[codes], i.bias if biased else None, act=act, dtype=i.x.dtype)


def whole(codes: torch.dtype, i: Operands) -> Tensor:
    return gemm_q(*quantize_rows(i.x, codes), *i.coded[codes][2:], i.bias, dtype=i.x.dtype)


def defined(i: Operands) -> Tensor:
    return gemm_q.reference(*i.coded[I8], i.bias, "none", i.x.dtype)


@torch.inference_mode()
def in_full(layer: Callable[..., Tensor], i: Operands) -> Tensor:
    return layer(i.x.float(), i.weight.float(), i.bias.float())


def scaled_mm(i: Operands, bias: Tensor | None = None) -> Tensor:
    x, x_scale, weight, weight_scale = i.coded[F8]
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None],
        bias=bias,
        out_dtype=BF16,
        use_fast_accum=True,
    )


def _rows() -> Iterator[tuple[str, Callable[[Operands], Any]]]:
    yield "bf16", lambda i: F.linear(i.x.to(BF16), i.weight.to(BF16))
    yield "bf16 bias", lambda i: F.linear(i.x.to(BF16), i.weight.to(BF16), i.bias.to(BF16))
    yield "_scaled_mm", scaled_mm
    yield "_scaled_mm + bias", lambda i: scaled_mm(i) + i.bias
    yield "_scaled_mm + bias + gelu", lambda i: F.gelu(scaled_mm(i) + i.bias, approximate="tanh")
    yield "_scaled_mm(bias)", lambda i: scaled_mm(i, i.bias)
    yield "_int_mm", lambda i: torch._int_mm(i.coded[I8][0], i.coded[I8][2].t())
    for name, codes in (("fp8", F8), ("int8", I8)):
        yield name, functools.partial(ours, codes, False, "none")
        yield f"{name} bias", functools.partial(ours, codes, True, "none")
        yield f"{name} bias gelu", functools.partial(ours, codes, True, "gelu_tanh")
        yield f"linear {name}", functools.partial(whole, codes)


ROWS: Mapping[str, Callable[[Operands], Any]] = MappingProxyType(dict(_rows()))

GPU_SHAPES = (
    (4608, 3072, 3072),
    (4608, 9216, 3072),
    (4608, 12288, 3072),
    (4608, 3072, 12288),
    (4608, 21504, 3072),
    (8704, 3072, 3072),
    (8704, 9216, 3072),
    (8704, 12288, 3072),
    (8704, 3072, 12288),
    (1024, 3072, 3072),
    (512, 12288, 3072),
    (16384, 5120, 5120),
    (32760, 13824, 5120),
)
"""Tokens, outputs, inputs: FLUX and Qwen-Image at 1024 x 1024 with one and two rows, texts, Wan 14B."""

ROUNDS = 3
OF_A_GRAPH = 8e12
"""Operations of the calls that are timed in one go."""

CPU_SHAPES = ((64, 384, 128), (260, 512, 128), (260, 128, 512), (1024, 1024, 1024), (260, 3072, 3072))


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, BF16, seconds=seconds)


def measure(
    device: str, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every row at every shape; nothing new starts after `seconds`."""
    deadline, made = time.monotonic() + seconds, []
    rows = dict(ROWS)
    if device == "cpu":
        rows = {name: call for name, call in rows.items() if not name.startswith("_scaled_mm")}
        for name, layer in (("fp32 layer", linear), ("fp32", F.linear)):
            rows = {name: functools.partial(in_full, layer), **rows}
        rows["int8 bias, reference"] = defined
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        sets = [(operands,) for operands in _operand_sets(device, *shape, dtype)]
        flops = 2 * math.prod(shape)
        # a graph of 5 to 15 ms
        calls = max(2, min(CALLS, math.ceil(OF_A_GRAPH / flops)))
        timer = functools.partial(time_on_gpu, calls=calls, repeats=3) if device == "cuda" else time_on_cpu
        found: dict[str, list[float]] = {what: [] for what in rows}
        problems = dict.fromkeys(rows, "no time left")
        # all take turns: a GPU that has been at work for a second is slower than one that has not
        for _, (what, call) in itertools.product(range(ROUNDS if device == "cuda" else 1), rows.items()):
            if time.monotonic() < deadline:
                once, problems[what] = attempt(timer, call, sets)
                found[what] += [] if once is None else [once]
        for what in rows:
            taken, problem = statistics.median(found[what]) if found[what] else None, problems[what]
            made.append(
                Measurement(
                    *shape,
                    what,
                    microseconds=None if taken is None else taken * 1e6,
                    teraflops=None if taken is None else flops / taken / 1e12,
                    problem=problem,
                )
            )
        del sets
    return made


def _operand_sets(device: str, tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> Iterator[Operands]:
    taken = (tokens + outputs) * inputs
    count = min(4, max(2, math.ceil(BEYOND_L2 / taken))) if device == "cuda" else 1
    for _ in range(count):
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype) / math.sqrt(inputs)
        coded = {codes: (*quantize_rows(x, codes), *quantize_rows(weight, codes)) for codes in (F8, I8)}
        yield Operands(x, weight, torch.randn(outputs, device=device, dtype=dtype), coded)


GOALS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fp8 / _scaled_mm": ("fp8", "_scaled_mm"),
        "bias / _scaled_mm": ("fp8 bias", "_scaled_mm"),
        "gelu / _scaled_mm": ("fp8 bias gelu", "_scaled_mm"),
        "bias / + bias": ("fp8 bias", "_scaled_mm + bias"),
        "gelu / + bias + gelu": ("fp8 bias gelu", "_scaled_mm + bias + gelu"),
        "int8 bias / _int_mm": ("int8 bias", "_int_mm"),
        "int8 bias / fp8 bias": ("int8 bias", "fp8 bias"),
        "int8 bias / reference": ("int8 bias", "int8 bias, reference"),
    }
)


def table(measurements: Sequence[Measurement]) -> str:
    """TFLOP/s of every row at each shape, and under them how ours compare: above 1 it is faster."""
    lines = []
    for shape, group in itertools.groupby(measurements, lambda m: (m.tokens, m.outputs, m.inputs)):
        found = {m.what: m for m in group}
        speeds = [f"{m.what} {m.teraflops:.4g}" if m.teraflops else f"{m.what}: {m.problem}" for m in found.values()]
        lines.append(f"{'x'.join(map(str, shape))}: {', '.join(speeds)}")
        ratios = [
            f"{name} {mine.teraflops / theirs.teraflops:.3f}"
            for name, (one, other) in GOALS.items()
            if (mine := found.get(one)) and (theirs := found.get(other)) and mine.teraflops and theirs.teraflops
        ]
        lines += [f"    {', '.join(ratios)}"] if ratios else []
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time products of 8 bits against torch's own and bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    if parser.parse_args().device == "cuda":
        print(table(gpu(math.inf)))
        return
    for dtype in (torch.float32, BF16):
        print(f"outputs in {dtype}\n{table(measure('cpu', CPU_SHAPES, dtype))}")


if __name__ == "__main__":
    main()
