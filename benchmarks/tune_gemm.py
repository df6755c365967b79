"""Measures every way to compute gemm_q on this GPU at shapes that models have: what comes with the package.

    python benchmarks/tune_gemm.py                       into omni_grpc/ops/tuned/<card>_gemm.json
    python benchmarks/tune_gemm.py --results FOLDER
    python benchmarks/tune_gemm.py --orders              each configuration in every order of tiles

Shapes that the file has are not measured again. It keeps the times of torch and of the best few ways. Each line of the
table has TFLOP/s of torch and of the best order of each configuration, for one shape and epilogue.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_gemm import GPU_SHAPES
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.gemm import candidates, gemm_calls
from omni_grpc.ops.gemm_kernels import TORCH, configurations, shape_of
from omni_grpc.ops.tuning import SHIPPED, Call, Candidates, Choices, Shape, Times, read, slug, write

FEATURES = ((3072, 3072), (9216, 3072), (12288, 3072), (3072, 12288))
"""Outputs and inputs of FLUX.1 and Qwen-Image."""

KEPT = 3
TEXTS = (32, 64, 128, 256, 512)
EPILOGUES = ((False, "none"), (True, "none"), (True, "gelu_tanh"))


def shapes() -> Iterator[tuple[int, int, int]]:
    yield from GPU_SHAPES
    yield from ((tokens, *features) for tokens, features in itertools.product(TEXTS, FEATURES))


def every_order(shape: Shape, device: torch.device) -> Mapping[str, Call]:
    codes = torch.int8 if shape.kind[0] == "int8" else torch.float8_e4m3fn
    names = configurations(codes, torch.cuda.get_device_capability(device))
    orders = [f"/{order}{wide}" for order, wide in itertools.product("tc", ("1", "2", "4", "8", "8e"))]
    return gemm_calls(shape, device, [TORCH, *(name + order for name in names for order in orders)])


def line(shape: Shape, times: Mapping[str, float]) -> str:
    *_, outputs, inputs = shape.kind
    flops = 2 * math.prod((shape.size, int(outputs), int(inputs)))
    best: dict[str, tuple[float, str]] = {}
    for way, taken in sorted(times.items(), key=lambda item: -item[1]):
        name, _, order = way.partition("/")
        best[name] = (flops / taken / 1e6, order)
    parts = [f"{name} {speed:.0f}{f'/{order}' if order else ''}" for name, (speed, order) in sorted(best.items())]
    return f"{shape.size}x{outputs}x{inputs} {shape.kind[0]} {shape.kind[1]}: {', '.join(parts)}"


def best(times: Mapping[str, float]) -> Times:
    """Those of torch and of the KEPT fastest."""
    fastest = sorted(times, key=times.__getitem__)[:KEPT]
    return {way: taken for way, taken in times.items() if way in fastest or way == TORCH}


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=SHIPPED, help="folder of the JSON file")
    parser.add_argument("--orders", action="store_true", help="every order of tiles")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--epilogues", type=int, nargs="*", default=(0, 1, 2), help="none, bias, bias and GELU")
    options = parser.parse_args()
    device, deadline = torch.device("cuda", 0), time.monotonic() + options.seconds
    make: Candidates = every_order if options.orders else candidates
    path = options.results / f"{slug(torch.cuda.get_device_name(device))}_gemm.json"
    kept, measured = Choices({}, path), {}
    for (tokens, outputs, inputs), codes, number in itertools.product(
        shapes(), (torch.float8_e4m3fn, torch.int8), options.epilogues
    ):
        bias, act = EPILOGUES[number]
        # GELU follows what widens, and nothing else
        if act != "none" and outputs <= inputs:
            continue
        shape = shape_of(codes, tokens, outputs, inputs, bias=bias, act=act)
        kept.tune({shape: make}, device, max(0.0, deadline - time.monotonic()))
        times = read(path).get(shape.family, {}).get(shape.size)
        if times:
            measured.setdefault(shape.family, {})[shape.size] = best(times)
            print(line(shape, times), flush=True)
    # written anew: `write` would keep what is left out
    path.unlink(missing_ok=True)
    write(path, measured)


if __name__ == "__main__":
    main()
