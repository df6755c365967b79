"""Blocks whose layers work in 8 bits: what quantises on the way gives the same as what quantises by itself, and is all
that quantises but behind an attention.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from omni_grpc.config import QuantizationConfig
from omni_grpc.features import Context, lora, quant
from omni_grpc.features.quant import CODES, QuantizedLinear
from omni_grpc.loading.checkpoint import WeightTarget
from omni_grpc.nn import activations
from omni_grpc.nn.activations import QuantizedActivation
from omni_grpc.nn.cross_dit import TEXT_K, TEXT_V, CrossDiTBlock
from omni_grpc.nn.dual_stream import IMG, DualStreamBlock
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.single_stream import SingleStreamBlock
from omni_grpc.nn.stack import Block, Stack
from omni_grpc.ops import norm
from omni_grpc.ops import quant as ops_quant
from omni_grpc.ops.declare import cell_of, is_op
from tests.toy import toy_spec

BLOCKS: Mapping[str, tuple[Callable[[], Block], int, int, int]] = {
    # block, width of its modulation, attention outputs that are quantised alone, and what is emitted
    "dual": (lambda: DualStreamBlock(2, 32), 12 * 64, 2, 6),
    "single": (lambda: SingleStreamBlock(2, 32, 88, 48), 4 * 64, 1, 3),
    "parallel single": (lambda: ParallelSingleBlock(2, 32), 3 * 64, 0, 2),
    "cross": (lambda: CrossDiTBlock(2, 32, 88), 6 * 64, 2, 4),
    "cross, joint": (lambda: CrossDiTBlock(2, 32, 88, stream=JOINT), 6 * 64, 2, 4),
}


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def quantised(make: Callable[[], Block], kind: str) -> Block:
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"stack": Stack(blocks=[make()])})
    weights = {path: part for path, part in module.named_modules() if isinstance(part, Linear)}
    context = Context(component="transformer", spec=toy_spec(), device=torch.device("cpu"), dtype=torch.float32)
    quant.apply(module, QuantizationConfig(quantization=kind), context)
    for path, linear in weights.items():
        layer = module.get_submodule(path)
        if isinstance(layer, QuantizedLinear):
            for name, parameter in linear.named_parameters():
                layer.load_tensor(name, parameter.detach())
    return module["stack"].group("blocks")[0]


def run(block: Block, width: int, count: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    rows = Rows([(None, "cond")] * count, [Row.of(txt=3, img=8)] * count, LayoutCache("cpu"))
    stream = IMG if block.carry == (IMG,) else JOINT
    rows.bind("rope", stream, [torch.randn(rows.stream(stream).total // count, 16, 2) for _ in range(count)])
    cross = isinstance(block, CrossDiTBlock)
    text = {TEXT_K: torch.randn(3 * count, 2, 32), TEXT_V: torch.randn(3 * count, 2, 32)} if cross else {}
    carry = [torch.randn(rows.stream(name).total, 64) for name in block.carry]
    with torch.no_grad():
        return block(*carry, rows=rows, mod=torch.randn(count, width), **text)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_block_that_quantises_on_the_way_computes_the_same(
    name: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, width, _, _ = BLOCKS[name]
    block = quantised(make, kind)
    # kernels, and then their references: one of each rounds otherwise, and a code falls to the other side
    for served in (True, False):
        if not served:
            monkeypatch.setattr(ops_quant, "_has_kernel", lambda x: False)
            for op in filter(is_op, (*vars(norm).values(), *vars(ops_quant).values())):
                if op is not ops_quant.gelu_tanh_op:
                    monkeypatch.setattr(cell_of(op, "_kernel_if"), "cell_contents", lambda *tensors: False)
        with monkeypatch.context() as each_for_itself:
            # as a layer does that is given full precision
            each_for_itself.setattr(activations, "read_dtype", lambda some: None)
            expected = run(block, width, rows)
        made = run(block, width, rows)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, expected, strict=True))


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_only_what_an_attention_gives_is_quantised_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, width, attentions, emitted = BLOCKS[name]
    block, calls = quantised(make, "fp8"), collections.Counter[str]()
    for module in (activations, quant):
        for function in [name for name in vars(module) if name.endswith(("_quantize", "quantize_rows"))]:
            original = getattr(module, function)

            def counted(*args: Any, original: Any = original, function: str = function, **more: Any) -> Any:
                calls[function] += 1
                return original(*args, **more)

            monkeypatch.setattr(module, function, counted)
    run(block, width)
    assert calls.pop("quantize_rows", 0) == attentions
    assert calls.total() == emitted


def test_tokens_that_lie_apart_are_quantised_where_they_lie() -> None:
    """Of two rows each has its text before its image."""
    plain, coded = DualStreamBlock(2, 32), quantised(lambda: DualStreamBlock(2, 32), "fp8")
    for block, copies in ((plain, 2), (coded, 0)):
        with Counted() as counted:
            run(block, 12 * 64, 2)
        assert counted.calls["quantize_rows"] == 2 - copies
        assert counted.calls["index_select"] == 4 + copies  # 4 are of the modulation


def test_a_reader_that_wants_full_precision_gets_it() -> None:
    """Also where another one reads the same. A layer with an adapter reads what the layer inside does."""
    block = quantised(lambda: ParallelSingleBlock(2, 32), "int8")
    assert activations.read_dtype((block.attn.to_qkv, block.proj_mlp)) == CODES["int8"]
    x, plain = torch.randn(4, 64), Linear(64, 64, stream=JOINT)
    assert isinstance(activations.gelu(plain, x, (block.proj_mlp,)), QuantizedActivation)
    wrapped = lora.LoraLinear(block.proj_mlp, "transformer")
    assert activations.read_dtype((block.attn.to_qkv, wrapped)) == CODES["int8"]
    assert lora.LoraLinear(plain, "transformer").activation_dtype is None
    assert activations.read_dtype((block.attn.to_qkv, plain)) is None
    assert isinstance(activations.gelu(plain, x, (block.attn.to_qkv, plain)), Tensor)
    assert WeightTarget("x").codes is None
    float8 = quantised(lambda: ParallelSingleBlock(2, 32), "fp8").proj_mlp
    assert activations.read_dtype((block.attn.to_qkv, float8)) is None
    assert activations.read_dtype((float8, float8)) == CODES["fp8"]


def test_without_quantisation_nothing_is() -> None:
    block = DualStreamBlock(2, 32)
    with Counted() as counted:
        run(block, 12 * 64)
    assert not [name for name in counted.calls if "quantize" in name]
