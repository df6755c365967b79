"""Times a linear layer in bfloat16 that GELU follows: the product alone, GELU in a pass of its own, in the epilogue.

    python -m benchmarks.bench_linear     on a GPU

A measurement is a CUDA graph of calls, timed with events. The errors are those of 300 tokens against float64, and how
far the exact GELU is from the tanh approximation there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import provenance, timing
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.linear import linear_gelu_tanh
from omni_grpc.ops.quant import gelu_tanh

SHAPES = (
    (4096, 12288, 3072),
    (8192, 12288, 3072),
    (4608, 12288, 3072),
    (512, 12288, 3072),
    (256, 12288, 3072),
    (32760, 13824, 5120),
    (4128, 10240, 3840),
    (8192, 3072, 12288),
)
"""Tokens, outputs, inputs: FLUX.1 and Qwen-Image, their texts, Wan 14B, and two that widen less or not at all."""


def layer(tokens: int, outputs: int, inputs: int, *, bias: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, added = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, inputs), (outputs, inputs), (outputs,))
    )
    return x, weight * inputs**-0.5, added * bias


def errors() -> str:
    x, weight, bias = layer(300, 12288, 3072, bias=0.1)
    before = F.linear(x.double(), weight.double(), bias.double())
    exact = F.gelu(before, approximate="tanh")
    off = {
        "fused": linear_gelu_tanh(x, weight, bias),
        "apart": gelu_tanh(F.linear(x, weight, bias)),
        "erf differs": F.gelu(before),
    }
    parts = (f"{name} {float((out.double() - exact).norm() / exact.norm()):.2e}" for name, out in off.items())
    return f"errors: {' '.join(parts)}"


def line(shape: tuple[int, int, int]) -> str:
    x, weight, bias = layer(*shape)
    calls = {
        "linear": lambda: F.linear(x, weight, bias),
        "linear+gelu": lambda: gelu_tanh(F.linear(x, weight, bias)),
        "fused": lambda: linear_gelu_tanh(x, weight, bias),
    }
    taken = {name: timing.time_on_gpu(call, [()], calls=8, repeats=7) * 1e6 for name, call in calls.items()}
    return f"{' '.join(map(str, shape))} {'  '.join(f'{name} {us:.1f}' for name, us in taken.items())}"


@torch.inference_mode()
def main() -> None:
    timing.require_gpu()
    torch.manual_seed(0)
    print(provenance.text("benchmarks/bench_linear.py"))
    print(errors())
    for shape in SHAPES:
        print(line(shape), flush=True)


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    main()
