"""What features do differently on CUDA. Run by `make gpu-test` too, on a machine that has torch and little else."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from omni_grpc.features.layerwise_offload import Offloaded
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.nn import readers
from omni_grpc.nn.linear import Coded, Linear
from omni_grpc.ops.gemm import FP8_CAPABILITY
from omni_grpc.ops.host import Region
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


KINDS = pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def layer(weight: Tensor, kind: torch.dtype, bias: Tensor | None = None) -> QuantizedLinear:
    """A layer on the weight's device."""
    if weight.is_cuda and kind == torch.float8_e4m3fn and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this card has no products of float8")
    with torch.device("meta"):
        made = QuantizedLinear(Linear(weight.shape[1], weight.shape[0], bias is not None, stream="img"), "layer", kind)
    made.take("weight", weight)
    if bias is not None:
        made.take("bias", bias)
    return made


@KINDS
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 300])
@torch.inference_mode()
def test_b062_a_layer_in_8_bits_is_the_same_product_as_on_the_cpu_for_any_number_of_tokens(
    tokens: int, kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator) for rows in (48, tokens))
    on_gpu, on_cpu = layer(weight.cuda(), kind)(x.cuda()).cpu(), layer(weight, kind)(x)
    close = 1e-5 if kind == torch.int8 else 3e-3
    torch.testing.assert_close(on_gpu, on_cpu, rtol=close, atol=10 * close)


@KINDS
@torch.inference_mode()
def test_b059_a_layer_in_8_bits_takes_a_byte_for_each_weight(kind: torch.dtype) -> None:
    weight = torch.randn(4096, 2048, dtype=torch.bfloat16, device="cuda")
    layer(weight, kind)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = layer(weight, kind)
    assert torch.cuda.memory_allocated() - before < 1.01 * weight.numel()
    assert made.weight.dtype == kind


@KINDS
@torch.inference_mode()
def test_b061_outliers_do_not_overflow(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 4096, generator=generator) / 640, torch.randn(8, 4096, generator=generator)
    x[:, 100], x[:, 101] = 1e4, -1e4
    out = layer(weight.cuda(), kind)(x.to("cuda", torch.bfloat16)).cpu()
    exact = x.double() @ weight.double().T
    assert out.isfinite().all()
    assert (out.double() - exact).norm() < 0.05 * exact.norm()


@KINDS
@torch.inference_mode()
def test_tokens_that_a_kernel_codes_on_its_way_are_what_the_layer_makes_of_them(kind: torch.dtype) -> None:
    """Codes are made of what is not rounded to bfloat16 yet, so they differ from those of the layer by that."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((96, 256), (96,), (70, 256)))
    made = layer(weight.cuda().bfloat16(), kind, bias.cuda().bfloat16())
    x = x.cuda().bfloat16()
    scale, shift = torch.zeros(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    read = readers.normed(x, scale, shift, None, 1e-6, (made,))
    assert isinstance(read, Coded)
    exact = torch.nn.functional.layer_norm(x.float(), (256,), eps=1e-6)
    expected = exact @ weight.cuda().bfloat16().float().T + bias.cuda()
    for out in (made(read), made(exact.bfloat16())):
        assert (out.float() - expected).norm() < 0.05 * expected.norm()


@KINDS
@torch.inference_mode()
def test_b072_quantised_layers_work_where_they_are_offloaded(kind: torch.dtype) -> None:
    """Twice: the second time what came for the first is gone."""
    weight, x = torch.randn(64, 64), torch.randn(9, 64, device="cuda")
    resident = layer(weight.cuda(), kind)
    with torch.device("meta"):
        base = QuantizedLinear(Linear(64, 64, bias=False, stream="img"), "layer", kind)
    offloaded = Offloaded(base, Region(1 << 20), torch.device("cuda"))
    offloaded.take("weight", weight.cuda())
    assert {tensor.device.type for tensor in offloaded.host.values()} == {"cpu"}
    for _ in range(2):
        assert torch.equal(offloaded(x), resident(x))
