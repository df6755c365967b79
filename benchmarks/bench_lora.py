"""Times what LoRA adapters cost: a step through blocks of Qwen-Image, and each kind of layer that they have, by the
number of adapters in a batch, their rank and the precision of the weights that they change.

    python -m benchmarks.bench_lora [--seconds 300] [--results FOLDER]     on a GPU: 8 pictures of 1024 x 1024
    python -m benchmarks.bench_lora --tiny                                 anywhere: small sizes, no record

Weights are random, and every linear layer of a block has all adapters. Row i of a batch has adapter i modulo their
number. The batches of two rows are those of one picture with guidance. `device` is the time of a CUDA graph of
one call (on a CPU, of the call), `host` that of the first call to the last launch, `added` the time over that of the
same layers without adapters. A step is that of BLOCKS blocks, without what a model does before and after them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from benchmarks import timing
from omni_grpc.config.command_line import Parser
from omni_grpc.features.lora import LoraLinear
from omni_grpc.features.quant import CODES, QuantizedLinear
from omni_grpc.nn.activations import Activation, for_readers
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.linear import AnyLinear, Linear, activate
from omni_grpc.nn.packed_linear import PackedLinear, Workspace
from omni_grpc.nn.rows import MOD, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.nn.updates import LowRankUpdate
from omni_grpc.ops.dequant import PACKINGS
from omni_grpc.ops.lora import UNPROVEN
from omni_grpc.types.lora import Lora

DTYPE = torch.bfloat16
BASES = ("bf16", "fp8", "int8", "gguf")
ADAPTERS = (0, 1, 2, 4, 8)
RANKS = (16, 64)
BLOCKS = 2
PARTS = 3
"""Of a fused layer of queries, keys and values, which have factors of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A model's heads and the tokens of each row."""

    heads: int
    head_size: int
    rows: int
    txt: int
    img: int

    @property
    def channels(self) -> int:
        return self.heads * self.head_size


QWEN_IMAGE = Size(24, 128, 8, 128, 4096)
TINY = Size(2, 32, 4, 8, 32)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`what`: a layer of a block, or "step"."""

    what: str
    base: str
    rows: int
    adapters: int
    rank: int
    device_ms: float | None
    host_us: float | None
    added_percent: float | None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    device: str
    size: Size
    blocks: int = BLOCKS

    def time(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds on the device, and of the host."""
        hosts = []
        for _ in range(5):
            if self.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            hosts.append(time.perf_counter() - start)
        if self.device == "cuda":
            return timing.time_on_gpu(call, [(), ()], calls=1), statistics.median(hosts[1:])
        return timing.time_on_cpu(call, [()]), statistics.median(hosts[1:])

    def rows(self, count: int, adapters: int) -> Rows:
        owners = [
            SimpleNamespace(request=SimpleNamespace(loras=(Lora(lora_id=f"a{row % adapters}"),) if adapters else ()))
            for row in range(count)
        ]
        return Rows(
            [(owner, "cond") for owner in owners],
            [Row.of(txt=self.size.txt, img=self.size.img)] * count,
            LayoutCache(self.device),
        )

    def block(self, base: str) -> DualStreamBlock:
        """A block with random weights in one precision, without adapters."""
        with torch.device(self.device):
            block = DualStreamBlock(self.size.heads, self.size.head_size).to(DTYPE).eval().requires_grad_(False)
        for parameter in block.parameters():
            parameter.normal_(std=0.02)
        workspace = Workspace(torch.device(self.device))
        for path, linear in list(block.named_modules()):
            if isinstance(linear, Linear) and linear.stream != MOD and base != "bf16":
                block.set_submodule(path, self._packed(linear, workspace) if base == "gguf" else _coded(linear, base))
        return block

    def _packed(self, linear: Linear, workspace: Workspace) -> PackedLinear:
        packing = PACKINGS["Q8_0"]
        layer = PackedLinear(linear, [(packing, linear.out_features)], DTYPE, workspace)
        blocks = torch.zeros(linear.weight.numel() // packing.elements, packing.size, dtype=torch.uint8)
        blocks[:, 2:].random_(256)
        blocks[:, :2] = torch.tensor([0.0002], dtype=torch.float16).view(torch.uint8)
        layer.load_tensor("weight", blocks.flatten().to(self.device))
        return layer

    def wrap(self, module: nn.Module, ranks: int) -> None:
        """Gives every layer that tokens pass through as many adapters as there can be."""
        for path, linear in list(module.named_modules()):
            if not isinstance(linear, AnyLinear) or linear.stream == MOD:
                continue
            layer = LoraLinear(linear, "transformer")
            parts = PARTS if path.endswith(("to_qkv", "add_qkv_proj")) else 1
            height = linear.out_features // parts
            for adapter in range(max(ADAPTERS)):
                layer.parts[f"a{adapter}"] = [
                    LowRankUpdate(
                        self.random(ranks, linear.in_features),
                        self.random(height, ranks),
                        slice(height * part, height * (part + 1)),
                    )
                    for part in range(parts)
                ]
            module.set_submodule(path, layer)

    def random(self, *size: int) -> Tensor:
        return 0.02 * torch.randn(*size, device=self.device, dtype=DTYPE)

    def step(self, blocks: Sequence[DualStreamBlock], rows: Rows) -> Callable[[], object]:
        """The blocks of a batch, with what was computed ahead bound."""
        size = self.size
        angles = torch.rand(rows.stream("joint").total, size.head_size // 2, device=self.device) * 6.28
        table = torch.stack([angles.cos(), angles.sin()], -1)
        rows.bind("rope", "joint", list(rows.stream("joint").split(table)))
        modulation = self.random(len(rows), len(blocks), 12 * size.channels)
        rows.bind("dual", "mod", list(rows.stream("mod").split(modulation)))
        stack = Stack(dual=blocks)
        carry = {name: self.random(rows.stream(name).total, size.channels) for name in ("txt", "img")}
        return lambda: stack(dict(carry), rows)


def _coded(linear: Linear, base: str) -> QuantizedLinear:
    layer = QuantizedLinear(linear, "layer", CODES[base])
    for name, parameter in linear.named_parameters():
        layer.load_tensor(name, parameter.detach())
    return layer


def measure(bench: Bench, seconds: float) -> Iterator[Measurement]:
    """Steps of all bases, then single layers. Nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    torch.manual_seed(0)
    for base, rank in itertools.product(BASES, RANKS):
        if time.monotonic() < deadline:
            yield from _guarded(bench, "step", base, rank, lambda base=base, rank=rank: _steps(bench, base, rank))
    for base, rank in itertools.product(BASES, RANKS):
        if time.monotonic() < deadline:
            yield from _guarded(bench, "layers", base, rank, lambda base=base, rank=rank: _layers(bench, base, rank))


def _guarded(
    bench: Bench, what: str, base: str, rank: int, make: Callable[[], Iterator[Measurement]]
) -> Iterator[Measurement]:
    try:
        with torch.inference_mode():
            yield from make()
    except Exception as error:  # noqa: BLE001 - what a device does not have, such as float8, and the other rows count
        lines = str(error).splitlines() or [""]
        yield Measurement(what, base, bench.size.rows, 0, rank, None, None, None, f"{type(error).__name__}: {lines[0]}")
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def _batches(bench: Bench) -> list[tuple[int, int]]:
    """Rows and adapters: none first, which the others are compared with."""
    return [*((bench.size.rows, count) for count in ADAPTERS), (2, 0), (2, 1)]


def _steps(bench: Bench, base: str, rank: int) -> Iterator[Measurement]:
    blocks = [bench.block(base) for _ in range(bench.blocks)]
    plain = {rows: bench.time(bench.step(blocks, bench.rows(rows, 0))) for rows in (bench.size.rows, 2)}
    for block in blocks:
        bench.wrap(block, rank)
    for rows, adapters in _batches(bench):
        taken = bench.time(bench.step(blocks, bench.rows(rows, adapters)))
        yield _measurement("step", base, rows, adapters, rank, taken, plain[rows])


def _layers(bench: Bench, base: str, rank: int) -> Iterator[Measurement]:
    block = bench.block(base)
    paths = ("attn.to_qkv", "attn.to_out", "img_mlp.up", "img_mlp.down")
    plain = {path: block.get_submodule(path) for path in paths}
    bench.wrap(block, rank)
    for path in paths:
        for rows, adapters in _batches(bench):
            batch = bench.rows(rows, adapters)
            with activate(batch):
                layer, inner = block.get_submodule(path), plain[path]
                assert isinstance(layer, AnyLinear)
                assert isinstance(inner, AnyLinear)
                x = for_readers(bench.random(batch.stream("img").total, layer.in_features), (inner,))
                gelu = path.endswith("up") and isinstance(x, Tensor)
                before = bench.time(_call(inner, x, gelu))
                taken = bench.time(_call(layer, x, gelu))
            yield _measurement(path, base, rows, adapters, rank, taken, before)


def _call(layer: AnyLinear, x: Activation, gelu: bool) -> Callable[[], object]:
    if gelu:
        assert isinstance(x, Tensor)
        return lambda: layer.gelu(x)
    return lambda: layer(x)


def _measurement(
    what: str, base: str, rows: int, adapters: int, rank: int, taken: tuple[float, float], plain: tuple[float, float]
) -> Measurement:
    return Measurement(
        what=what,
        base=base,
        rows=rows,
        adapters=adapters,
        rank=rank,
        device_ms=1e3 * taken[0],
        host_us=1e6 * taken[1],
        added_percent=100 * (taken[0] / plain[0] - 1),
    )


def gpu(seconds: float) -> list[Measurement]:
    return list(measure(Bench("cuda", QWEN_IMAGE), seconds))


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        f"{'what':13} {'base':5} {'rows':>4} {'adapters':>8} {'rank':>4} {'device ms':>10} {'host us':>9} {'added':>7}"
    ]
    for m in measurements:
        head = f"{m.what:13} {m.base:5} {m.rows:>4} {m.adapters:>8} {m.rank:>4}"
        numbers = f"{m.device_ms:10.3f} {m.host_us:9.1f} {m.added_percent:6.1f}%" if m.device_ms is not None else ""
        lines.append(f"{head} {numbers or m.problem}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time what LoRA adapters cost a step")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, without a record")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    # what is timed is what GPUs are to use
    os.environ.setdefault(UNPROVEN, "1")
    if options.tiny:
        print(table(list(measure(Bench("cpu", TINY), options.seconds))))
        return
    timing.require_gpu()
    made = measure(Bench("cuda", QWEN_IMAGE), options.seconds)
    print(table(timing.recorded("benchmarks/bench_lora.py", "lora", made, options.results)))


if __name__ == "__main__":
    main()
