"""Linear layers in full precision: whichever library computes them, it is the same layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from omni_grpc.nn.linear import Linear
from omni_grpc.ops import linear as ops_linear
from omni_grpc.ops.linear import LEAST_PRODUCTS, linear, linear_gelu_tanh, mkl_is_narrow
from omni_grpc.ops.quant import gelu_tanh

HAS_ONEDNN = torch.backends.mkldnn.is_available()


@contextlib.contextmanager
def narrow(holds: bool) -> Iterator[mock.MagicMock]:
    """On a processor where it is so, and how often oneDNN is called there."""
    called = mock.MagicMock(side_effect=torch.ops.mkldnn._linear_pointwise)
    with (
        mock.patch.object(ops_linear, "mkl_is_narrow", return_value=holds),
        mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", called),
        torch.inference_mode(),
    ):
        yield called


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(130, 128, 384), (37, 513, 301), (2000, 64, 16), (4100, 1, 500)])
def test_onednn_gives_the_layer(shape: tuple[int, int, int], with_bias: bool, seed: int) -> None:
    tokens, inputs, outputs = shape
    x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if with_bias else None
    with narrow(True) as called:
        out = linear(x, weight, bias)
    assert called.call_count == 1
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close = 1e-6 * inputs**0.5
    torch.testing.assert_close(out.double(), exact, atol=4 * close, rtol=1e-5, msg=lambda text: f"seed {seed}: {text}")


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
def test_what_it_is_not_for_is_torchs_own() -> None:
    x, weight = torch.randn(256, 128), torch.randn(128, 128)
    assert x.shape[0] * weight.numel() >= LEAST_PRODUCTS
    for given, of in (
        (x[:100], weight),
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (torch.randn(256, 256)[:, ::2], weight),
        (x, weight.t()),
        (x[None], weight),
    ):
        with narrow(True) as called:
            assert torch.equal(linear(given, of, None), F.linear(given, of))
        assert not called.called
    with narrow(False) as called:
        assert torch.equal(linear(x, weight, None), F.linear(x, weight))
    assert not called.called
    weight.requires_grad_()
    with mock.patch.object(ops_linear, "mkl_is_narrow", return_value=True):
        linear(x, weight, None).sum().backward()
    assert weight.grad is not None


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
def test_layers_of_models_have_it() -> None:
    layer = Linear(128, 384, stream="img").requires_grad_(False)
    with narrow(True) as called:
        layer(torch.randn(130, 128))
    assert called.call_count == 1


@pytest.mark.parametrize(
    ("capability", "vendor", "narrow"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_mkl_is_narrow_where_vectors_are_wide_and_not_intels(
    capability: str, vendor: str, narrow: bool, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    with (
        mock.patch.object(ops_linear, "CPU_INFO", info),
        mock.patch("torch.backends.cpu.get_cpu_capability", return_value=capability),
    ):
        assert mkl_is_narrow.__wrapped__() is (narrow and HAS_ONEDNN)
    with mock.patch.object(ops_linear, "CPU_INFO", tmp_path / "none"):
        assert not mkl_is_narrow.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gelu_of_a_layer_is_what_it_is_of_the_result(with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, 24, dtype=dtype), torch.randn(56, 24, dtype=dtype)
    bias = torch.randn(56, dtype=dtype) if with_bias else None
    with torch.no_grad():
        assert torch.equal(linear_gelu_tanh(x, weight, bias), gelu_tanh(linear(x, weight, bias)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(1, 64, 64), (2, 8, 24), (33, 264, 1032), (515, 3072, 12288)])
def test_on_a_gpu_the_epilogue_is_the_tanh_approximation(shape: tuple[int, int, int]) -> None:
    """Half a step of bfloat16 off at most, also near -2.7 where the exact GELU is 4.7e-4 away, 30 times that."""
    (tokens, inputs, outputs), seed = shape, torch.seed()
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16()
    bias = torch.linspace(-4, 4, outputs, device="cuda").bfloat16()
    with torch.inference_mode():
        out = linear_gelu_tanh(x, weight, bias).double()
    before = F.linear(x.double(), weight.double(), bias.double())
    exact = F.gelu(before, approximate="tanh")
    excess = (out - exact).abs() - 2.0**-8 * exact.abs() - 2e-5
    assert excess.max() <= 0, f"seed {seed}: off by {float(excess.max()):.2e} more than rounding allows"
