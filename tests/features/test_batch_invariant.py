"""What --batch-invariant does to the layers of a denoiser, where a library would go by the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.config import LoraConfig, ModelConfig, QuantizationConfig
from omni_grpc.features import Context, batch_invariant, lora, quant
from omni_grpc.features.batch_invariant import RowwiseLinear
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.loading.checkpoint import WeightTarget
from omni_grpc.nn.linear import Linear, activate
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops import gemm_kernels
from omni_grpc.ops.quant import gelu_tanh
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Lora
from omni_grpc.types.spec import WeightMap
from tests.features.suite import save
from tests.toy import toy_spec

SETTING = ModelConfig(model="any", batch_invariant=True)
LAYOUTS = LayoutCache("cpu")


class ByTokens(Linear):
    """Stands for a library: the result hangs on how many tokens there are."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * (1 + 0.01 * x.shape[0])

    def gelu(self, x: Tensor) -> Tensor:
        return gelu_tanh(self(x)) + 1e-4 * x.shape[0]


def context(**more: Any) -> Context:
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "batch_invariant": True} | more
    return Context(component="transformer", spec=toy_spec(weights={"transformer": WeightMap()}), **settings)


def rows(*loras: tuple[Lora, ...]) -> Rows:
    """Three tokens of "img" for the first, and one more for each after it."""
    owners = [(SimpleNamespace(request=SimpleNamespace(loras=its)), "cond") for its in loras]
    return Rows(owners, [Row.of(txt=2, img=3 + number) for number in range(len(loras))], LAYOUTS)


def each_alone(layer: Callable[[Tensor], Tensor], batch: Rows, x: Tensor) -> list[Tensor]:
    out = []
    for row, tokens in enumerate(batch.stream("img").split(x)):
        with activate(Rows([batch.owners[row]], [batch.layout.rows[row]], LAYOUTS)):
            out.append(layer(tokens))
    return out


def test_a_layer_in_full_precision_computes_each_row_as_it_would_alone() -> None:
    module = nn.Module()
    module.layer = ByTokens(6, 8, stream="img").requires_grad_(False)
    batch, x = rows((), (), ()), torch.randn(12, 6)
    plain = module.layer
    batch_invariant.apply(module, SETTING, context())
    assert isinstance(module.layer, RowwiseLinear)
    assert module.layer.shapes() == plain.shapes()
    assert module.layer.weight is plain.weight
    with activate(batch):
        results = [(module.layer, module.layer(x), plain(x)), (module.layer.gelu, module.layer.gelu(x), plain.gelu(x))]
    for layer, together, by_the_library in results:
        alone = each_alone(layer, batch, x)
        assert torch.equal(together, torch.cat(alone))
        assert not torch.equal(together, by_the_library)
    assert torch.equal(alone[0], plain.gelu(x[:3])), "what computes GELU with the layer does so of each row"


def test_a_layer_in_8_bits_gets_one_way_for_any_number_of_tokens() -> None:
    for invariant in (True, False):
        module = nn.Module()
        module.blocks = Stack(single=[nn.ModuleDict({"up": Linear(16, 16, stream="img")})])
        module.head = Linear(16, 16, stream="img")
        here = context(batch_invariant=invariant)
        quant.apply(module, QuantizationConfig(quantization="int8"), here)
        batch_invariant.apply(module, SETTING, here)
        quantized = [part for part in module.modules() if isinstance(part, QuantizedLinear)]
        assert [part.config for part in quantized] == ["invariant" if invariant else "auto"]
        assert [name for name, part in module.named_modules() if isinstance(part, RowwiseLinear)] == ["head"]


def test_rows_with_the_same_adapters_are_computed_apart(tmp_path: Any) -> None:
    module = nn.Module()
    module.layer = Linear(6, 8, stream="img").requires_grad_(False)
    save({"q.lora_A.weight": torch.randn(2, 6), "q.lora_B.weight": torch.randn(8, 2)}, tmp_path / "a.safetensors")
    here = context(places={"q": WeightTarget("layer")})
    lora.apply(module, LoraConfig(lora={"a": str(tmp_path / "a.safetensors")}), here)
    both, x = (Lora(lora_id="a"),), torch.randn(7, 6)
    batch = rows(both, both)
    with activate(batch):
        together = module.layer(x)
    (plan,) = module.layer._plans.values()
    assert plan.low_rank.runs == [0, 3, 1, 3, 4, 1], "first token, tokens, parts"
    for row, part in enumerate(x.split([3, 4])):
        with activate(batch.narrow([row])):
            assert torch.equal(module.layer(part), together.split([3, 4])[row])


@pytest.mark.parametrize(
    ("scheme", "dtype", "has", "works"),
    [
        ("fp8", torch.bfloat16, ("pingpong_128x128",), True),
        ("fp8", torch.bfloat16, (), False),
        ("fp8", torch.float32, ("pingpong_128x128",), False),
        ("int8", torch.float32, (), True),
    ],
)
def test_fp8_without_kernels_of_ours_is_refused(
    scheme: str, dtype: torch.dtype, has: tuple[str, ...], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm_kernels, "configurations", lambda codes, capability: has)
    module = nn.Module()
    module.blocks = Stack(single=[nn.ModuleDict({"up": Linear(16, 16, stream="img")})])
    here = context(device=torch.device("cuda", 0), dtype=dtype)
    if works:
        quant.apply(module, QuantizationConfig(quantization=scheme), here)
        return
    with pytest.raises(ConfigError, match="leave out --batch-invariant, or use --quantization int8") as caught:
        quant.apply(module, QuantizationConfig(quantization=scheme), here)
    assert caught.value.failure.violations[0].field == "batch_invariant"
