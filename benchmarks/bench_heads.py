"""Times quantize_heads, which makes e4m3 of queries, keys and values for attention in 8 bits.

    python benchmarks/bench_heads.py        on a GPU

Measured as timing.py measures; GB/s count each input once and each output once, though it reads its inputs twice.
`eager` is the same in torch, `copy` copies as many bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import BEYOND_L2, Call, attempt, require_gpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.heads import quantize_heads


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens of each row, heads of 128."""

    name: str
    rows: tuple[int, ...]
    heads: int


SHAPES = (
    Shape("FLUX", (4608,), 24),
    Shape("FLUX, 4 unlike", (4608, 1536, 1024, 4250), 24),
    Shape("Wan 480p", (32760,), 40),
)
SIZE = 128


@dataclasses.dataclass(frozen=True)
class Measurement:
    shape: str
    tokens: int
    what: str
    microseconds: float | None
    gb_per_s: float | None
    problem: str = ""


def gpu(seconds: float) -> list[Measurement]:
    """Every candidate at every shape; nothing new starts after `seconds`."""
    deadline, made = time.monotonic() + seconds, []
    for shape in SHAPES:
        tokens = sum(shape.rows)
        cu = torch.tensor([0, *shape.rows], device="cuda").cumsum(0, dtype=torch.int32)
        moved = 3 * tokens * shape.heads * SIZE * 3  # two bytes in, one out
        count = max(1, BEYOND_L2 // moved)
        sets = [
            tuple(torch.randn(tokens, shape.heads, SIZE, device="cuda").bfloat16() for _ in range(3))
            for _ in range(count)
        ]
        copies = [(torch.empty(moved // 2, dtype=torch.uint8, device="cuda"),) for _ in range(2 * count)]
        offsets = (cu, cu, max(shape.rows), max(shape.rows))
        candidates: dict[str, tuple[Call, Sequence[tuple[torch.Tensor, ...]]]] = {
            "copy": (torch.clone, copies),
            "kernel": (lambda *qkv, offsets=offsets: quantize_heads(*qkv, *offsets), sets),
            "eager": (functools.partial(_eager, lengths=shape.rows), sets),
        }
        for what, (call, inputs) in candidates.items():
            taken, problem = None, "no time left"
            if time.monotonic() < deadline:
                taken, problem = attempt(functools.partial(time_on_gpu, calls=8), call, inputs)
            made.append(
                Measurement(
                    shape=shape.name,
                    tokens=tokens,
                    what=what,
                    microseconds=None if taken is None else taken * 1e6,
                    gb_per_s=None if taken is None else moved / taken / 1e9,
                    problem=problem,
                )
            )
    return made


def _eager(*qkv: torch.Tensor, lengths: tuple[int, ...]) -> object:
    """As one would write it."""
    rows = zip(*(x.split(lengths) for x in qkv), strict=True)
    return [[(x / (x.abs().amax((0, 2), keepdim=True) / 448)).to(torch.float8_e4m3fn) for x in row] for row in rows]


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'shape':>15} {'tokens':>7} {'what':8} {'us':>9} {'GB/s':>7}"]
    for m in measurements:
        figures = m.problem if m.microseconds is None else f"{m.microseconds:9.1f} {m.gb_per_s:7.0f}"
        lines.append(f"{m.shape:>15} {m.tokens:>7} {m.what:8} {figures}")
    return "\n".join(lines)


def main() -> None:
    require_gpu()
    print(table(gpu(math.inf)))


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    main()
