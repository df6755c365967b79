"""Times the dequant family: what is dispatched to, beside the reference, which is a few operators of torch, and a copy.

    python benchmarks/bench_dequant.py             the GPU where there is one, else the CPU
    python benchmarks/bench_dequant.py --device cpu

Measured as bench_norm measures. The copy writes as many bytes as the op, and reads as many too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.dequant import PACKINGS, Packing, dequantize, dequantize_op

SHAPE = (3072, 3072)
"""[out, in]: a projection of FLUX.1 and of Qwen-Image."""

Call = Callable[[Tensor], object]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb_per_s` counts packed bytes read once and numbers written once."""

    packing: str
    dtype: str
    what: str
    microseconds: float
    gb_per_s: float


def candidates(packing: Packing, out: Tensor) -> dict[str, Call]:
    source = torch.empty_like(out)
    return {
        "copy": lambda packed: out.copy_(source),
        "reference": lambda packed: dequantize_op.reference(packed, packing.number, out),
        "dispatched": lambda packed: dequantize(packed, packing, out),
    }


def measure(device: str, *, seconds: float = math.inf) -> list[Measurement]:
    """Every candidate for every type. Nothing new starts after `seconds`."""
    deadline, measurements = time.monotonic() + seconds, []
    for packing, dtype in itertools.product(PACKINGS.values(), (torch.float32, torch.bfloat16)):
        out = torch.empty(SHAPE, dtype=dtype, device=device)
        # zeros are as fast as any other bytes, and never subnormal
        packed = torch.zeros(packing.bytes_of(out.numel()), dtype=torch.uint8, device=device)
        for what, call in candidates(packing, out).items():
            if time.monotonic() > deadline:
                return measurements
            taken = (time_on_gpu if device == "cuda" else time_on_cpu)(call, [(packed,)])
            moved = (packed.nbytes + out.nbytes) / taken / 1e9
            name = str(dtype).removeprefix("torch.")
            measurements.append(Measurement(packing.name, name, what, round(1e6 * taken, 1), round(moved, 1)))
    return measurements


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", seconds=seconds)


def table(measurements: Sequence[Measurement]) -> str:
    head = f"{'type':6} {'dtype':9} {'what':11} {'us':>9} {'GB/s':>7}"
    return "\n".join(
        [head, *(f"{m.packing:6} {m.dtype:9} {m.what:11} {m.microseconds:9} {m.gb_per_s:7}" for m in measurements)]
    )


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    print(table(measure(parser.parse_args().device)))


if __name__ == "__main__":
    main()
