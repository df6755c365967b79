"""What features do differently on CUDA. Run by `make gpu-test` too, on a machine that has torch and little else."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from omni_grpc.features.layerwise_offload import Offloaded
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.nn.linear import Linear
from omni_grpc.ops.gemm import FP8_CAPABILITY
from tests.features.offloaded import LAYER_BYTES, held, pair, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.inference_mode()
def test_offloaded_weights_are_pinned_and_two_blocks_at_most_take_memory() -> None:
    plain, stack, _ = pair("cuda")
    expected = run(plain, "cuda")
    for _ in range(5):
        assert torch.equal(run(stack, "cuda"), expected)
    # the text's layers were not called, and are pinned when they are
    layers = [layer for layer in stack.modules() if isinstance(layer, Offloaded) and layer.stream != "txt"]
    assert all(tensor.is_pinned() for layer in layers for tensor in layer.host.values())
    assert held(stack) == 0
    del plain
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(stack, "cuda")
    # two blocks of two layers, and what the forward itself takes
    assert torch.cuda.max_memory_allocated() - before < 2 * 2 * LAYER_BYTES + (1 << 20)


@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
@pytest.mark.parametrize(("kind", "close"), [(torch.int8, 1e-5), (torch.float8_e4m3fn, 3e-3)], ids=["int8", "fp8"])
@torch.inference_mode()
def test_a_layer_in_8_bits_is_the_same_product_as_on_the_cpu(tokens: int, kind: torch.dtype, close: float) -> None:
    if kind == torch.float8_e4m3fn and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this card has no products of float8")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator) for rows in (48, tokens))

    def out(device: str) -> Tensor:
        with torch.device("meta"):
            layer = QuantizedLinear(Linear(64, 48, bias=False, stream="img"), "layer", kind)
        layer.take("weight", weight.to(device))
        return layer(x.to(device)).cpu()

    torch.testing.assert_close(out("cuda"), out("cpu"), rtol=close, atol=10 * close)
