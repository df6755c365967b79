"""Times qk_norm_rope against what it replaces, and against a copy of the same bytes: the ceiling.

    python benchmarks/bench_rope.py             the GPU where there is one, else the CPU
    python benchmarks/bench_rope.py --device cpu

Measured as bench_norm measures. `eager` is the code of this package's blocks without the op, `diffusers` the way its
attention processors write it (attention_processor.py and embeddings.apply_rotary_emb); `e4m3` and `int8` write codes
with a scale for each head of each token, `e4m3 rows` with one for each head of the one row there is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_norm import EPS
from benchmarks.timing import BEYOND_L2, attempt, time_on_cpu, time_on_gpu
from omni_grpc.config.command_line import Parser
from omni_grpc.ops.rope import Heads, qk_norm_rope, qk_norm_rope_quantize
from omni_grpc.ops.rope_heads import qk_norm_rope_quantize_heads


@dataclasses.dataclass(frozen=True)
class Shape:
    """tokens: of each stream. With one stream, v stays where it is."""

    name: str
    tokens: tuple[int, ...]
    heads: int
    size: int
    norm: str = "rms"


GPU_SHAPES = (
    Shape("FLUX, Qwen-Image dual", (512, 4096), 24, 128),
    Shape("FLUX single", (4608,), 24, 128),
    Shape("Wan 14B 480p", (32760,), 40, 128, "rms_across"),
)
CPU_SHAPES = (
    Shape("demo dual", (32, 64), 4, 32),
    Shape("demo dual", (64, 256), 4, 32),
    Shape("demo across", (260,), 4, 32, "rms_across"),
    Shape("FLUX dual", (512, 4096), 24, 128),
    Shape("Wan 1.3B", (4680,), 12, 128, "rms_across"),
)


@dataclasses.dataclass
class Inputs:
    """qkv [T_s, 3, H, D] of each stream, weights of q's and k's norm, table [T, D / 2, 2], where each token goes."""

    qkv: list[Tensor]
    weights: list[tuple[Tensor, Tensor]]
    table: Tensor
    cosine: Tensor
    sine: Tensor
    place: list[Tensor]
    rows: Tensor
    norm: str


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`gb_per_s` counts q, k (and v, where it moves) and the table read once, and the results written once."""

    shape: str
    tokens: int
    heads: int
    size: int
    norm: str
    dtype: str
    what: str
    microseconds: float | None
    gb_per_s: float | None
    problem: str = ""


def _normed(x: Tensor, weight: Tensor, norm: str) -> Tensor:
    if norm == "rms":
        return F.rms_norm(x, weight.shape, weight, EPS)
    return F.rms_norm(x.flatten(1), weight.shape, weight, EPS).view(x.shape)


def _joined(given: Inputs) -> tuple[Tensor, ...]:
    """q, k, v of all streams, q and k normed, rows one after the other."""
    parts = [
        (_normed(qkv[:, 0], weight_q, given.norm), _normed(qkv[:, 1], weight_k, given.norm), qkv[:, 2])
        for qkv, (weight_q, weight_k) in zip(given.qkv, given.weights, strict=True)
    ]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(x) for x in zip(*parts, strict=True))


def eager(given: Inputs) -> tuple[Tensor, ...]:
    q, k, v = _joined(given)
    turns = torch.view_as_complex(given.table)[:, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns).flatten(-2).to(x.dtype)
        for x in (q, k)
    )
    return q, k, v


def diffusers(given: Inputs) -> tuple[Tensor, ...]:
    q, k, v = _joined(given)
    made = []
    for x in (q, k):
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imaginary, real], -1).flatten(2)
        made.append((x.float() * given.cosine + turned.float() * given.sine).to(x.dtype))
    return *made, v


def _streams(given: Inputs) -> list[Heads]:
    return [Heads(*qkv.unbind(1), weights) for qkv, weights in zip(given.qkv, given.weights, strict=True)]


def kernel(given: Inputs) -> tuple[Tensor, ...]:
    return qk_norm_rope(_streams(given), given.table, given.place, norm=given.norm, eps=EPS)


def codes(given: Inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return qk_norm_rope_quantize(_streams(given), given.table, given.place, codes=dtype, norm=given.norm, eps=EPS)


def row_codes(given: Inputs) -> tuple[Tensor, ...]:
    cu = given.rows
    return qk_norm_rope_quantize_heads(_streams(given), given.table, given.place, cu, norm=given.norm, eps=EPS)


def copy(given: Inputs) -> list[Tensor]:
    moved = 3 if given.place else 2
    return [qkv.flatten()[: qkv.numel() * moved // 3].clone() for qkv in given.qkv]


CANDIDATES: Mapping[str, Callable[[Inputs], object]] = MappingProxyType(
    {
        "copy": copy,
        "eager": eager,
        "diffusers": diffusers,
        "kernel": kernel,
        "e4m3": functools.partial(codes, dtype=torch.float8_e4m3fn),
        "int8": functools.partial(codes, dtype=torch.int8),
        "e4m3 rows": row_codes,
    }
)
PASSES = (("copy", "kernel", "e4m3", "e4m3 rows", "int8"), ("eager", "diffusers"), ("compile", "compile2"))
ORDER = ("copy", "eager", "diffusers", "compile", "compile2", "kernel", "e4m3", "e4m3 rows", "int8")
"""`compile` is eager compiled, `compile2` diffusers."""


def measure(
    device: str, shapes: Sequence[Shape], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every candidate at every shape. torch.compile comes last, as it takes longest: nothing new starts after
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    made: dict[tuple[Shape, str], Measurement] = {}
    passes = PASSES if device == "cuda" else (("copy", "kernel"), PASSES[1])
    for names, shape in itertools.product(passes, shapes):
        if time.monotonic() > deadline:
            break
        sets = [(inputs,) for inputs in _input_sets(device, shape, dtype)]
        for what in names:
            made[(shape, what)] = _measured(shape, what, sets, dtype, deadline)
        del sets
    return [made[key] for key in itertools.product(shapes, ORDER) if key in made]


def _measured(shape: Shape, what: str, sets: list[tuple[Inputs]], dtype: torch.dtype, deadline: float) -> Measurement:
    call = CANDIDATES.get(what)
    if call is None:
        torch.compiler.reset()
        call = torch.compile(eager if what == "compile" else diffusers, dynamic=False)
    taken, problem = None, "no time left"
    if time.monotonic() < deadline:
        taken, problem = attempt(time_on_gpu if sets[0][0].table.is_cuda else time_on_cpu, call, sets)
    return Measurement(
        shape=shape.name,
        tokens=sum(shape.tokens),
        heads=shape.heads,
        size=shape.size,
        norm=shape.norm,
        dtype=str(dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        gb_per_s=None if taken is None else _moved(shape, dtype, what) / taken / 1e9,
        problem=problem,
    )


def _moved(shape: Shape, dtype: torch.dtype, what: str) -> int:
    values = sum(shape.tokens) * shape.heads * shape.size
    if what in ("e4m3", "e4m3 rows", "int8"):
        scales = 0 if what == "e4m3 rows" else 3 * sum(shape.tokens) * shape.heads * 4
        return 3 * values * (dtype.itemsize + 1) + scales + sum(shape.tokens) * shape.size * 4
    parts = 3 if len(shape.tokens) > 1 else 2
    table = 0 if what == "copy" else sum(shape.tokens) * shape.size * 4
    return 2 * parts * values * dtype.itemsize + table


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def _input_sets(device: str, shape: Shape, dtype: torch.dtype) -> list[Inputs]:
    total, channels = sum(shape.tokens), shape.heads * shape.size
    count = max(2, math.ceil(BEYOND_L2 / (3 * total * channels * dtype.itemsize))) if device == "cuda" else 1
    width = shape.size if shape.norm == "rms" else channels
    angles = torch.randn(total, shape.size // 2, device=device)
    table = torch.stack([angles.cos(), angles.sin()], -1)
    cosine, sine = (x.repeat_interleave(2, -1)[:, None] for x in table.unbind(-1))
    place = torch.arange(total, device=device, dtype=torch.int32).split(shape.tokens)
    return [
        Inputs(
            [torch.randn(tokens, 3, shape.heads, shape.size, device=device).to(dtype) for tokens in shape.tokens],
            [
                (torch.ones(width, device=device, dtype=dtype), torch.ones(width, device=device, dtype=dtype))
                for _ in shape.tokens
            ],
            table,
            cosine,
            sine,
            list(place) if len(shape.tokens) > 1 else [],
            torch.tensor([0, total], dtype=torch.int32, device=device),
            shape.norm,
        )
        for _ in range(count)
    ]


def table(measurements: Sequence[Measurement]) -> str:
    """A row for each shape and candidate; `speedup` is eager's time over this one's."""
    lines = [f"{'shape':>34} {'dtype':>8}  {'what':9} {'us':>9} {'GB/s':>7} {'of copy':>8} {'speedup':>8}"]
    for _, group in itertools.groupby(measurements, lambda m: (m.shape, m.tokens, m.dtype)):
        by_name = {m.what: m for m in group}
        for m in by_name.values():
            head = f"{f'{m.shape} {m.tokens}x{m.heads}x{m.size}':>34} {m.dtype:>8}  {m.what:9}"
            if m.microseconds is None or m.gb_per_s is None:
                lines.append(f"{head} {m.problem}")
                continue
            ceiling, base = by_name["copy"].gb_per_s, by_name["eager"].microseconds if "eager" in by_name else None
            of_copy = f"{m.gb_per_s / ceiling:8.0%}" if ceiling else f"{'-':>8}"
            speedup = f"{base / m.microseconds:7.2f}x" if base else f"{'-':>8}"
            lines.append(f"{head} {m.microseconds:9.1f} {m.gb_per_s:7.0f} {of_copy} {speedup}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time qk_norm_rope against eager torch, diffusers and torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        print(table(measure(device, GPU_SHAPES if device == "cuda" else CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
