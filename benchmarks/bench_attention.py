"""Times every attention backend that runs here, in TFLOP/s, at the shapes of models and over mixtures of rows.

    python benchmarks/bench_attention.py             the GPU where there is one, else the CPU
    python benchmarks/bench_attention.py --device cpu
    python benchmarks/bench_attention.py --seconds 60 --results benchmarks/results

Measured as timing.py measures: on a GPU the device's time alone, and beside it what a call takes as a model makes it,
with the host's part. "apart" is a backend with one call for each run of rows of equal lengths in place of one for all,
"codes" its kernel alone, on what is in 8 bits already. "block" is what a model calls: the pass that norms and turns,
and attention by what auto takes, or in fp8. `first` is what the first call of a shape takes.
`error` is relative to float64 at queries that are drawn. On a CPU the shapes are those of a small model: what rows of
unlike lengths reach is to be compared with what as many of one length reach, which are one call of torch's attention,
and with torch's two matrix products alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pkgutil
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import BEYOND_L2, attempt, record, time_on_cpu, time_on_gpu, time_with_host
from omni_grpc.config.backends import AUTO, BACKENDS, lack
from omni_grpc.config.command_line import Parser
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.norms import AcrossHeadsNorm
from omni_grpc.nn.query_key import Projected, attend
from omni_grpc.nn.rows import LayoutCache, Row
from omni_grpc.nn.rows import Rows as NnRows
from omni_grpc.ops.attention import use_of
from omni_grpc.ops.attention_kernels import Offsets, flash_3_quantized, flash_3_quantized_apart
from omni_grpc.ops.heads import QuantizedHeads, quantize_heads

DRAWN = 64
"""Queries that the error is of."""
PIECE = 0.012
"""Seconds of the device that one measurement is to have at least, and seven times that all in all."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one call is for: tokens of each row, heads and their size. keys: of each row, where they are others."""

    name: str
    rows: tuple[int, ...]
    heads: int
    size: int
    keys: tuple[int, ...] = ()
    kv_heads: int = 0

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.rows, self.keys or self.rows, strict=True))

    @property
    def flops(self) -> float:
        return 4.0 * sum(n * m for n, m in self.lengths) * self.heads * self.size


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`problem` says why there is no time."""

    shape: str
    rows: int
    tokens: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    dtype: str
    what: str
    microseconds: float | None
    tflop_per_s: float | None
    with_host: float | None = None
    error: float | None = None
    first: float | None = None
    problem: str = ""


def drawn(rows: int, least: int = 100, most: int = 300) -> tuple[int, ...]:
    return tuple(random.Random(rows).randint(least, most) for _ in range(rows))


GPU_SHAPES = (
    Shape("4.6k", (4608,), 24, 128),
    Shape("1.5k", (1536,), 24, 128),
    Shape("9k", (9216,), 24, 128),
    Shape("32k", (32760,), 40, 128),
    Shape("mixture", (4608, 1536, 1024, 4250), 24, 128),
    Shape("75k", (75600,), 40, 128),
    Shape("text of 32k", (32760,), 40, 128, keys=(512,)),
    Shape("4.6k twice", (4608,) * 2, 24, 128),
    Shape("4.6k, 4.5k", (4608, 4480), 24, 128),
    Shape("1.5k x 8", (1536,) * 8, 24, 128),
    Shape("small x 32", (300,) * 32, 24, 128),
    Shape("small, 32", drawn(32, 200, 400), 24, 128),
    Shape("small, 6", drawn(6, 300, 1100), 24, 128),
    Shape("head 64", (4250,), 38, 64),
    Shape("text of 2", (32760, 8190), 40, 128, keys=(512, 77)),
    Shape("grouped", (4608,), 24, 128, kv_heads=8),
    Shape("demo", (260,), 4, 32),
    Shape("demo, 6", drawn(6), 4, 32),
)
"""FLUX and Qwen-Image, requests of unlike sizes, Wan at 480p and at 720p of 81 frames and its look at a text, Stable
Diffusion 3, the bundled model. What counts most comes first: time may run out."""


CPU_SHAPES = tuple(
    shape
    for rows in (1, 4, 16, 64)
    for shape in (
        Shape(f"{rows} unlike", drawn(rows), 4, 32),
        Shape(f"{rows} like", (sum(drawn(rows)) // rows,) * rows, 4, 32),
    )
)

Call = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]
"""q, k, v."""


def gpu(seconds: float) -> list[Measurement]:
    return measure("cuda", GPU_SHAPES, torch.bfloat16, seconds=seconds)


def measure(
    device: str, shapes: Sequence[Shape], dtype: torch.dtype, *, seconds: float = math.inf
) -> list[Measurement]:
    """Every backend at every shape; nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    made = []
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        sets = _inputs(shape, device, dtype)
        for name, call, missing in _ways(shape, device, dtype):
            if device == "cuda":
                made.append(_on_gpu(shape, dtype, name, call, missing, sets))
            elif not missing:
                made.append(_on_cpu(shape, dtype, name, call, sets))
        if device == "cuda":
            made += _codes_on_gpu(shape, dtype, sets)
            made += _blocks_on_gpu(shape, dtype)
        if device == "cpu":
            made.append(_on_cpu(shape, dtype, "products alone", functools.partial(_products, shape), sets))
    return made


def _ways(shape: Shape, device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call, str]]:
    """Each backend in each of its forms, and what it lacks."""
    offsets = _offsets(shape, device)
    for name, backend in BACKENDS.items():
        missing = _missing(name, shape, device, dtype)
        forms = {name: backend.run} | ({f"{name} apart": backend.apart} if backend.apart else {})
        for form, path in forms.items():

            def call(q: Tensor, k: Tensor, v: Tensor, path: str = path) -> Tensor:
                out: Tensor = pkgutil.resolve_name(path)(q, k, v, offsets, shape.size**-0.5, False).contiguous()
                return out

            yield form, call, missing


def _missing(name: str, shape: Shape, device: str, dtype: torch.dtype) -> str:
    grouped = shape.kv_heads not in (0, shape.heads)
    return lack(BACKENDS[name], use_of(torch.device(device), dtype, shape.size, causal=False, grouped=grouped))


def _offsets(shape: Shape, device: str) -> Offsets:
    queries, keys = ([*itertools.accumulate(column, initial=0)] for column in zip(*shape.lengths, strict=True))
    host_q, host_k = (torch.tensor(offsets, dtype=torch.int32) for offsets in (queries, keys))
    longest_q, longest_k = (max(column) for column in zip(*shape.lengths, strict=True))
    return Offsets(
        cu_q=host_q.to(device),
        cu_k=host_k.to(device),
        longest_q=longest_q,
        longest_k=longest_k,
        host_q=host_q,
        host_k=host_k,
    )


def _inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Inputs]:
    """As the pass before an attention leaves them: apart and contiguous."""
    tokens, keys = (sum(column) for column in zip(*shape.lengths, strict=True))
    kv_heads = shape.kv_heads or shape.heads
    shapes = [(tokens, shape.heads), (keys, kv_heads), (keys, kv_heads)]
    size = sum(n * heads for n, heads in shapes) * shape.size * dtype.itemsize
    count = min(_calls(shape), max(1, BEYOND_L2 // size)) if device == "cuda" else 1
    return [
        tuple(torch.randn(n, heads, shape.size, device=device).to(dtype) for n, heads in shapes) for _ in range(count)
    ]


def _calls(shape: Shape) -> int:
    """How many a graph has: about PIECE of them at 400 TFLOP/s, for which small shapes are too short."""
    return max(1, min(20, int(PIECE / (shape.flops / 4e14))))


def _on_gpu(
    shape: Shape,
    dtype: torch.dtype,
    what: str,
    call: Call,
    problem: str,
    sets: list[Inputs],
    made_of: list[Inputs] | None = None,
) -> Measurement:
    """`sets` are inputs of the call, `made_of` what they were made of, which the error is of; [] where it has none."""
    taken, error, first, with_host, calls = None, None, None, None, _calls(shape)
    repeats = max(2, min(15, int(6 * PIECE / (calls * shape.flops / 4e14))))
    if not problem:
        first, problem = attempt(_first, call, sets[0])
    if not problem and made_of != []:
        exact = sets if made_of is None else made_of
        error, problem = attempt(lambda call, inputs: _error(shape, exact[0], call(*inputs)), call, sets[0])
    if not problem:
        taken, problem = attempt(functools.partial(time_on_gpu, calls=calls, repeats=repeats), call, sets)
        if shape.flops < 1e12:
            with_host, problem = attempt(functools.partial(time_with_host, calls=calls), call, sets)
    return _measurement(shape, dtype, what, taken, problem, with_host, error, first)


def _first(call: Call, inputs: Inputs) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(*inputs)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _codes_on_gpu(shape: Shape, dtype: torch.dtype, sets: list[Inputs]) -> list[Measurement]:
    at, name, made = _offsets(shape, "cuda"), "FLASH_ATTN_3_FP8", []
    missing = _missing(name, shape, "cuda", dtype)
    coded: list[Inputs] = []
    if not missing:
        coded = [quantize_heads(*inputs, at.cu_q, at.cu_k, at.longest_q, at.longest_k) for inputs in sets]
    for what, run in ((f"{name} codes", flash_3_quantized), (f"{name} codes apart", flash_3_quantized_apart)):

        def call(*parts: Tensor, run: Call = run) -> Tensor:
            return run(QuantizedHeads(*parts), at, shape.size**-0.5, False)

        made.append(_on_gpu(shape, dtype, what, call, missing, coded, sets))
    return made


def _blocks_on_gpu(shape: Shape, dtype: torch.dtype) -> list[Measurement]:
    """From what the projections of a block make to what its attention gives. Wan's norms, of 40 heads, are over all."""
    if shape.keys or shape.kv_heads:
        return []
    across = shape.heads == 40
    rows = NnRows([(None, "cond")] * len(shape.rows), [Row.of(img=n) for n in shape.rows], LayoutCache("cuda"))
    norm = AcrossHeadsNorm(shape.heads * shape.size, 1e-6) if across else torch.nn.RMSNorm(shape.size, 1e-6)
    norm = norm.to("cuda", dtype).requires_grad_(False)
    tokens = sum(shape.rows)
    angles = torch.rand(tokens, shape.size // 2, device="cuda")
    table = torch.stack([angles.cos(), angles.sin()], -1)
    sets = [
        (torch.randn(tokens, 3, shape.heads, shape.size, device="cuda").to(dtype),)
        for _ in range(min(_calls(shape), max(1, BEYOND_L2 // (3 * tokens * shape.heads * shape.size * 2))))
    ]
    made = []
    for backend in (AUTO, "FLASH_ATTN_3_FP8"):
        attention = Attention(shape.heads, shape.size)
        attention.backend = backend

        def call(qkv: Tensor, attention: Attention = attention) -> Tensor:
            return attend(attention, Projected(*qkv.unbind(1), norm, norm), table, rows, over="img")

        missing = "" if backend == AUTO else _missing(backend, shape, "cuda", dtype)
        made.append(_on_gpu(shape, dtype, f"block, {backend}", call, missing, sets, []))
    return made


def _on_cpu(shape: Shape, dtype: torch.dtype, what: str, call: Call, sets: list[Inputs]) -> Measurement:
    taken, problem = attempt(time_on_cpu, call, sets)
    return _measurement(shape, dtype, what, taken, problem)


def _measurement(
    shape: Shape,
    dtype: torch.dtype,
    what: str,
    taken: float | None,
    problem: str,
    with_host: float | None = None,
    error: float | None = None,
    first: float | None = None,
) -> Measurement:
    return Measurement(
        shape=shape.name,
        rows=len(shape.rows),
        tokens=sum(shape.rows),
        keys=sum(shape.keys or shape.rows),
        heads=shape.heads,
        kv_heads=shape.kv_heads or shape.heads,
        size=shape.size,
        dtype=str(dtype).removeprefix("torch."),
        what=what,
        microseconds=None if taken is None else taken * 1e6,
        tflop_per_s=None if taken is None else shape.flops / taken / 1e12,
        with_host=None if with_host is None else with_host * 1e6,
        error=error,
        first=None if first is None else first * 1e6,
        problem=problem,
    )


def _error(shape: Shape, inputs: Inputs, out: Tensor) -> float:
    """Relative to what queries of the last row give in float64."""
    (q, k, v), (n, m) = inputs, shape.lengths[-1]
    at = torch.randint(0, n, (DRAWN,), device=q.device) + q.shape[0] - n
    head = shape.heads - 1
    kv_head = head // (shape.heads // k.shape[1])
    queries, keys, values = (x.double() for x in (q[at, head], k[-m:, kv_head], v[-m:, kv_head]))
    exact = (queries @ keys.T * shape.size**-0.5).softmax(-1) @ values
    return ((out[at, head].double() - exact).norm() / exact.norm()).item()


def _products(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    parts = zip(*(x.transpose(0, 1).split(list(shape.rows), 1) for x in (q, k, v)), strict=True)
    return [q @ k.transpose(1, 2) @ v for q, k, v in parts]


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        f"{'shape':>12} {'rows':>4} {'tokens':>7} {'what':18} {'us':>9} {'TFLOP/s':>8} {'with host':>9} {'error':>8}"
    ]
    for m in measurements:
        start = f"{m.shape:>12} {m.rows:>4} {m.tokens:>7} {m.what:18}"
        host = "" if m.with_host is None else f"{m.with_host:.1f}"
        error = "" if m.error is None else f"{m.error:.1e}"
        figures = m.problem[:60]
        if m.microseconds is not None:
            first = "" if m.first is None else f"{m.first:.0f}"
            figures = f"{m.microseconds:9.1f} {m.tflop_per_s:8.3f} {host:>9} {error:>8} {first:>10}"
        lines.append(f"{start} {figures}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time the attention backends that run here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing new starts after that, on a GPU")
    parser.add_argument("--results", type=Path, help="folder of a JSON file, for a GPU")
    options = parser.parse_args()
    if options.device == "cuda":
        made = gpu(options.seconds)
        print(table(made))
        if options.results is not None:
            print(f"written: {record('benchmarks/bench_attention.py', 'attention', made, options.results)}")
        return
    for dtype in (torch.float32, torch.bfloat16):
        print(dtype)
        print(table(measure("cpu", CPU_SHAPES, dtype)))


if __name__ == "__main__":
    main()
