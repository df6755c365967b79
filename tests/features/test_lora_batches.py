"""What a layer adds to a batch: all kinds of changes at once, on layers of all kinds, and what is remembered of it."""

from __future__ import annotations

import logging
import secrets
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.features.batch_invariant import RowwiseLinear
from omni_grpc.features.lora import LoraLinear
from omni_grpc.features.lora.layer import MAX_PLANS
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.nn.activations import QuantizedActivation, quantize
from omni_grpc.nn.linear import AnyLinear, Linear, activate
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.updates import BiasUpdate, DenseUpdate, KronUpdate, LowRankUpdate, Update
from omni_grpc.ops.gemm_kernels import AUTO, INVARIANT
from omni_grpc.types.lora import Lora

INPUTS, OUTPUTS = 48, 96
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
REQUESTS: tuple[tuple[Lora, ...], ...] = (
    (Lora(lora_id="fused"),),
    (),
    (Lora(lora_id="split", scale=-0.5), Lora(lora_id="fused", scale=0.25)),
    (Lora(lora_id="fused", scale=0.0),),
    (Lora(lora_id="one", scale=2.0),),
    (Lora(lora_id="one", scale=2.0),),
    (Lora(lora_id="kron"), Lora(lora_id="bias", scale=3.0), Lora(lora_id="elsewhere")),
    (Lora(lora_id="dense", scale=0.5, target="transformer"), Lora(lora_id="one", target="transformer_2")),
    *((Lora(lora_id=f"r{rank}"),) for rank in (3, 16, 17, 40)),
)
LENGTHS = (5, 1, 7, 3, 2, 4, 6, 9, 1, 33, 70, 8)

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
BASES = pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbelow(2**32)
    logging.getLogger(__name__).warning("seed %d", seed)  # pytest shows it where a test fails
    return torch.Generator().manual_seed(seed)


def base(kind: str, device: str, dtype: torch.dtype, *, invariant: bool = False) -> AnyLinear:
    plain = Linear(INPUTS, OUTPUTS, stream="img").requires_grad_(False).to(device, dtype)
    if kind == "plain":
        return RowwiseLinear(plain) if invariant else plain
    layer = QuantizedLinear(plain, "layer", CODES[kind], config=INVARIANT if invariant else AUTO)
    for name, parameter in plain.named_parameters():
        layer.load_tensor(name, parameter.detach())
    return layer


def wrapped(
    kind: str, device: str, dtype: torch.dtype, generator: torch.Generator, *, apart: bool = False
) -> LoraLinear:
    """A layer with adapters of all kinds."""
    layer = LoraLinear(base(kind, device, dtype, invariant=apart), "transformer", apart=apart)

    def number(*size: int) -> Tensor:
        return (0.3 * torch.randn(*size, generator=generator)).to(device, dtype)

    def low_rank(rank: int, rows: slice = slice(0, OUTPUTS)) -> LowRankUpdate:
        return LowRankUpdate(number(rank, INPUTS), number(rows.stop - rows.start, rank), rows)

    thirds = [slice(at, at + OUTPUTS // 3) for at in range(0, OUTPUTS, OUTPUTS // 3)]
    parts: dict[str, list[Update]] = {
        "fused": [low_rank(16)],
        "split": [*(low_rank(4 + at, rows) for at, rows in enumerate(thirds)), BiasUpdate(number(32), thirds[1])],
        "one": [low_rank(1)],
        "kron": [KronUpdate(number(8, 6), number(12, 8), slice(0, OUTPUTS), slice(0, OUTPUTS))],
        "dense": [DenseUpdate(number(10, INPUTS), slice(20, 30))],
        "bias": [BiasUpdate(number(OUTPUTS), slice(0, OUTPUTS))],
        **{f"r{rank}": [low_rank(rank)] for rank in (3, 16, 17, 40)},
    }
    layer.parts.update(parts)
    return layer


def rows_of(requests: tuple[tuple[Lora, ...], ...] = REQUESTS, device: str = "cpu") -> Rows:
    owners = [SimpleNamespace(request=SimpleNamespace(loras=loras)) for loras in requests]
    lengths = LENGTHS[: len(owners)]
    return Rows(
        [(owner, "cond") for owner in owners], [Row.of(txt=2, img=tokens) for tokens in lengths], LayoutCache(device)
    )


def tokens_for(rows: Rows, device: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(rows.stream("img").total, INPUTS, generator=generator).to(device, dtype)


def changes(layer: LoraLinear, rows: Rows, x: Tensor) -> Tensor:
    """What is to be added, by the matrix of each change, in float64."""
    total = x.new_zeros(x.shape[0], OUTPUTS, dtype=torch.float64)
    for row, (owner, _) in enumerate(rows.owners):
        here = rows.stream("img").slice(row)
        for lora in owner.request.loras:
            if lora.target in ("", "transformer"):
                for update in layer.parts.get(lora.lora_id, ()):
                    change = update.change(torch.eye(INPUTS, device=x.device, dtype=x.dtype)).double()
                    if isinstance(update, BiasUpdate):
                        total[here, update.rows] += lora.scale * update.vector.double()
                    else:
                        total[here, update.rows] += lora.scale * x[here].double() @ change
    return total


@DEVICES
@BASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_each_row_gets_what_its_adapters_change(
    device: str, kind: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    layer, rows = wrapped(kind, device, dtype, generator), rows_of(device=device)
    x = tokens_for(rows, device, dtype, generator)
    given: Tensor | QuantizedActivation = x
    if kind != "plain":
        given = quantize(x, CODES[kind])
        x = (given.codes.float() * given.scale[:, None]).to(dtype)
    want, wide = changes(layer, rows, x), layer.base(given).double()
    close = {"rtol": 0.03, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 3e-3}
    with activate(rows):
        torch.testing.assert_close(layer(given).double(), wide + want, **close)
        if kind == "plain":
            torch.testing.assert_close(layer.gelu(given).double(), F.gelu(wide + want, approximate="tanh"), **close)
    # and alone what it gets in company
    for row, (there, part) in enumerate(zip((wide + want).split(LENGTHS), x.split(LENGTHS), strict=True)):
        with activate(rows.narrow([row])):
            alone = (
                part
                if kind == "plain"
                else QuantizedActivation(*(each.split(LENGTHS)[row] for each in given[:2]), dtype)
            )
            torch.testing.assert_close(layer(alone).double(), there, **close)


@DEVICES
@BASES
@torch.inference_mode()
def test_without_a_change_the_layer_is_the_one_inside_to_the_bit(
    device: str, kind: str, generator: torch.Generator
) -> None:
    """Nobody has an adapter, or at scale 0, or of another component, or one that changes other layers."""
    layer = wrapped(kind, device, torch.bfloat16, generator)
    none = (), (Lora(lora_id="fused", scale=0.0),), (Lora(lora_id="one", target="text"),), (Lora(lora_id="elsewhere"),)
    for requests in (none, *((each,) for each in none)):
        rows = rows_of(requests, device)
        x = tokens_for(rows, device, torch.bfloat16, generator)
        with activate(rows):
            assert torch.equal(layer(x), layer.base(x))
            assert torch.equal(layer.gelu(x), layer.base.gelu(x))
    # beside others, too
    rows = rows_of(device=device)
    x = tokens_for(rows, device, torch.bfloat16, generator)
    with activate(rows):
        changed, plain = layer(x), layer.base(x)
    same = [torch.equal(*both) for both in zip(changed.split(LENGTHS), plain.split(LENGTHS), strict=True)]
    assert [row for row, equal in enumerate(same) if equal] == [1, 3]


@DEVICES
@BASES
@torch.inference_mode()
def test_apart_a_row_has_the_same_bits_in_any_batch(device: str, kind: str, generator: torch.Generator) -> None:
    if kind == "fp8" and device == "cuda":
        pytest.skip("float8 on a GPU has no invariant product of every shape")
    layer = wrapped(kind, device, torch.bfloat16, generator, apart=True)
    rows = rows_of(device=device)
    x = tokens_for(rows, device, torch.bfloat16, generator)
    with activate(rows):
        together, gelu = layer(x), layer.gelu(x)
    for row, part in enumerate(x.split(LENGTHS)):
        with activate(rows.narrow([row])):
            assert torch.equal(layer(part), together.split(LENGTHS)[row]), row
            assert torch.equal(layer.gelu(part), gelu.split(LENGTHS)[row]), row


@torch.inference_mode()
def test_a_plan_is_made_when_adapters_change_and_not_at_each_step(generator: torch.Generator) -> None:
    layer = wrapped("plain", "cpu", torch.float32, generator)
    x = tokens_for(rows_of(), "cpu", torch.float32, generator)
    for _ in range(3):
        with activate(rows_of()):  # each step has rows of its own
            before = layer(x)
    (plan,) = layer._plans.values()
    assert len(plan.low_rank.runs) == 3 * 8  # runs with something of low rank; two requests have the same
    layer.parts["one"] = [LowRankUpdate(torch.zeros(1, INPUTS), torch.zeros(OUTPUTS, 1), slice(0, OUTPUTS))]
    with activate(rows_of()):
        after = layer(x)
    same = [torch.equal(*both) for both in zip(before.split(LENGTHS), after.split(LENGTHS), strict=True)]
    assert [row for row, equal in enumerate(same) if not equal] == [4, 5]
    del layer.parts["one"]
    layer.parts["elsewhere"] = [BiasUpdate(torch.ones(OUTPUTS), slice(0, OUTPUTS))]
    with activate(rows_of()):
        last = layer(x)
    torch.testing.assert_close(last.split(LENGTHS)[6], after.split(LENGTHS)[6] + 1)
    assert torch.equal(last.split(LENGTHS)[4], after.split(LENGTHS)[4])


@torch.inference_mode()
def test_plans_are_bounded(generator: torch.Generator) -> None:
    layer = wrapped("plain", "cpu", torch.float32, generator)
    for number in range(2 * MAX_PLANS + 1):
        rows = rows_of(((Lora(lora_id="one", scale=1.0 + number),),))
        with activate(rows):
            layer(tokens_for(rows, "cpu", torch.float32, generator))
    assert 0 < len(layer._plans) <= MAX_PLANS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BASES
@torch.inference_mode()
def test_a_captured_layer_repeats_its_bits(kind: str, generator: torch.Generator) -> None:
    layer, rows = wrapped(kind, "cuda", torch.bfloat16, generator), rows_of(device="cuda")
    x = tokens_for(rows, "cuda", torch.bfloat16, generator)
    with activate(rows):
        expected = layer(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
