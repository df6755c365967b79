"""The gemm family: the kernels that this process dispatches to, the reference and the two together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops import gemm, gemm_kernels
from omni_grpc.ops.tuning import Choices
from tests.ops.gemm_cases import BF16, CASES, F8, F32, I8, Case, exact, inputs_of

OP = torch.ops.omni_grpc.gemm_q.default


def test_kernels_are_named() -> None:
    assert "CUDA" in ops.kernels()["gemm_q"]
    assert ("CPU" in ops.kernels()["gemm_q"]) == ops.load_native().loaded


def test_by_hand() -> None:
    x, weight = torch.tensor([[1, 2, -3], [127, 127, 127]]), torch.tensor([[10, 0, 1], [-127, -127, 127]])
    scales, bias = (torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])), torch.tensor([0.0, 1.0])
    for codes in (I8, F32):
        if codes is F32:
            # codes of float8 that stand for the same numbers: 127 has none
            x, weight, codes = x.clamp(-3, 112), weight.clamp(-112, 112), F8
        out = gemm.gemm_q(x.to(codes), scales[0], weight.to(codes), scales[1], bias, dtype=F32)
        sums = x.double() @ weight.double().T
        assert out.tolist() == [
            [sums[0, 0] * 0.5, sums[0, 1] * 0.125 + 1],
            [sums[1, 0] * 2, sums[1, 1] * 0.5 + 1],
        ]


@pytest.mark.parametrize("function", [gemm.gemm_q, gemm.gemm_q.reference])
@pytest.mark.parametrize("codes", [I8, F8])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("channels", [1, 2, 3, 16])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_few_input_channels(
    function: Callable[..., Tensor], codes: torch.dtype, dtype: torch.dtype, channels: int, width: int
) -> None:
    """A product of one channel, for which torch's own leaves memory unwritten on a CPU."""
    x = torch.arange(3 * width).view(3, width).to(codes)
    weight = (torch.arange(channels * width).view(channels, width) - 4).to(codes)
    args = (x, torch.ones(3), weight, torch.ones(channels), None)
    out = function(*args, act="none", dtype=dtype)
    assert torch.equal(out, (x.double() @ weight.double().T).to(dtype))


def test_sums_of_float8_are_exact_however_they_are_ordered(seed: int) -> None:
    """Largest and smallest codes together: float32 would lose the small ones, and how many by the order."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.tensor([448.0, -448.0, 2.0**-9, 3 * 2.0**-9, 0.0])
    x, weight = (pick[torch.randint(0, 5, (8, 4096), generator=generator)].to(F8) for _ in range(2))
    ones, order = torch.ones(8), torch.randperm(4096, generator=generator)
    out = gemm.gemm_q(x, ones, weight, ones, dtype=torch.float64)
    assert torch.equal(
        out, gemm.gemm_q(x[:, order].contiguous(), ones, weight[:, order].contiguous(), ones, dtype=torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_served_by_the_reference(dtype: torch.dtype, seed: int) -> None:
    case = Case(4, 24, 16, I8, dtype, dtype)
    given = inputs_of(case, "cpu", seed)
    out = gemm.gemm_q(*given.operands, dtype=dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact(case, given), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    "case",
    [Case(5, 16, 8, I8), Case(33, 24, 5, I8, F32, None, "gelu_tanh"), Case(0, 8, 8, I8), Case(3, 0, 8, I8)],
    ids=str,
)
def test_opcheck(case: Case, seed: int) -> None:
    torch.library.opcheck(OP, (*inputs_of(case, "cpu", seed).operands, case.act, case.dtype))


def test_compiles_whole(seed: int) -> None:
    given = [inputs_of(Case(17, 48, 24, codes), "cpu", seed) for codes in (I8, F8)]

    def everything(*operands: Any) -> tuple[Tensor, ...]:
        return (
            gemm.gemm_q(*operands[:5], act="gelu_tanh", dtype=BF16),
            gemm.gemm_q(*operands[5:], dtype=F32),
        )

    args = (*given[0].operands, *given[1].operands)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), everything(*args), rtol=0, atol=0)


@pytest.mark.parametrize("function", [OP, gemm.gemm_q.reference])
def test_wrong_inputs_are_refused_alike(function: Callable[..., Tensor], seed: int) -> None:
    x, x_scale, weight, weight_scale, bias = inputs_of(Case(4, 16, 8, I8), "cpu", seed).operands
    for message, operands in {
        "x must be [T, K] and weight [N, K]": (x[:, 1:], x_scale, weight, weight_scale, bias),
        "int8": (x.to(torch.uint8), x_scale, weight.to(torch.uint8), weight_scale, bias),
        "x_scale must be float32 [4]": (x, x_scale[1:], weight, weight_scale, bias),
        "weight_scale must be float32 [8]": (x, x_scale, weight, weight_scale.double(), bias),
        "bias must be [8]": (x, x_scale, weight, weight_scale, bias[1:]),
    }.items():
        with pytest.raises(RuntimeError, match="gemm_q: ") as caught:
            function(*operands, "none", BF16)
        assert message in str(caught.value)
    with pytest.raises(RuntimeError, match="act must be one of none, gelu_tanh, got 'relu'"):
        function(x, x_scale, weight, weight_scale, bias, "relu", BF16)
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        gemm.gemm_q.reference(x, x_scale, weight.to("meta"), weight_scale, bias, "none", BF16)


class Strict:
    """Stands for torch's products on CUDA: what they refuse (torch's native/cuda/Blas.cpp), and what they give."""

    def __init__(self) -> None:
        self.calls = 0

    def int_mm(self, x: Tensor, weight: Tensor) -> Tensor:
        self._check(x, weight, 8)
        assert x.shape[0] > 16
        return (x.double() @ weight.double()).to(torch.int32)

    def scaled_mm(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        self._check(x, weight, 16)
        assert x.is_contiguous()
        assert x.shape[0] > 16
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        by_row = scale_a.numel() > 1 or scale_a.dim() == 2
        if by_row:
            assert scale_a.shape == (x.shape[0], 1)
            assert scale_b.shape == (1, weight.shape[1])
            assert out_dtype == BF16
        assert bias is None or (bias.shape == weight.shape[1:] and bias.dtype == out_dtype == BF16)
        out = x.double() @ weight.double() * scale_a * scale_b
        return (out if bias is None else out + bias).to(out_dtype)

    def _check(self, x: Tensor, weight: Tensor, step: int) -> None:
        self.calls += 1
        assert x.shape[1] == weight.shape[0] > 0
        assert not x.shape[1] % step
        assert not weight.shape[1] % step
        assert weight.t().is_contiguous(), "column-major"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_cuda_is_given_is_what_its_products_take(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strict, given = Strict(), inputs_of(case, "cpu", seed)
    expected = exact(case, given)
    monkeypatch.setattr(torch, "_int_mm", strict.int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", strict.scaled_mm)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    out = gemm.gemm_q_cuda(*given.operands, case.act, case.dtype, "torch")
    assert out.is_contiguous()
    assert out.dtype == case.dtype
    close = {F32: 1e-5, BF16: 2.0**-6}[case.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)
    assert strict.calls == bool(case.tokens and case.inputs and case.outputs)


class Configured:
    """Stands for the library's configurations: what they refuse (csrc/bind/gemm.cpp), and what they give."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, act: str, name: str
    ) -> Tensor:
        self.calls += 1
        assert name.startswith("pingpong_128x128")
        assert not x.shape[1] % 16
        assert not weight.shape[0] % 8
        assert min(x.shape) > 0
        assert bias is None or bias.dtype == BF16
        out = x.double() @ weight.double().T * x_scale[:, None] * weight_scale
        out = out if bias is None else out + bias
        return (torch.nn.functional.gelu(out, approximate="tanh") if act == "gelu_tanh" else out).to(BF16)


@pytest.mark.parametrize("config", ["auto", "invariant"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_configurations_are_given_is_what_they_take(
    case: Case, config: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict, configured, given = Strict(), Configured(), inputs_of(case, "cpu", seed)
    monkeypatch.setattr(torch, "_int_mm", strict.int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", strict.scaled_mm)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm, "configurations", lambda codes, capability: ("pingpong_128x128",))
    monkeypatch.setattr(gemm, "chosen", lambda *asked: "pingpong_128x128")
    monkeypatch.setattr(gemm.gemm_q_configured, "overload", configured)
    out = gemm.gemm_q_cuda(*given.operands, case.act, case.dtype, config)
    assert out.is_contiguous()
    assert out.shape == (case.tokens, case.outputs)
    close = {F32: 1e-5, BF16: 2.0**-6}[case.dtype]
    torch.testing.assert_close(out.double(), exact(case, given), rtol=close, atol=close)
    takes = case.dtype == BF16 and case.bias in (None, BF16) and bool(case.tokens and case.inputs and case.outputs)
    aligned = not case.inputs % 16 and not case.outputs % 16
    assert configured.calls == (takes and (aligned or config == "invariant"))
    if config == "invariant" and case.codes == F8:
        assert not strict.calls, "torch adds up float8 by the number of tokens"


def test_ways_by_generation_and_kind() -> None:
    lines = (
        "sm90 fp8 pingpong_128x128\nsm90 fp8 stream_k_128x128\nsm90 int8 pingpong_128x128\n"
        "sm89 fp8 mma_128x128\nsm80 int8 mma_64x64\n"
    )
    assert gemm_kernels.parsed(lines, F8, (9, 0)) == ("pingpong_128x128", "stream_k_128x128")
    assert gemm_kernels.parsed(lines, I8, (9, 0)) == ("pingpong_128x128",)
    assert gemm_kernels.parsed(lines, F8, (8, 9)) == ("mma_128x128",)
    assert gemm_kernels.parsed(lines, I8, (8, 6)) == ("mma_64x64",)
    assert gemm_kernels.parsed(lines, I8, (9, 0), older=True) == ("pingpong_128x128", "mma_64x64")
    assert gemm_kernels.parsed(lines, F8, (10, 0)) == gemm_kernels.parsed(lines, F8, (8, 6)) == ()
    names = ("pingpong_64x128", "pingpong_128x192", "pingpong_128x128")
    assert gemm_kernels.invariant(names, 9216, 3072) == "pingpong_128x192/t1e"
    assert gemm_kernels.invariant(names, 3072, 3072) == "pingpong_128x128/c1e"
    assert gemm_kernels.invariant(("mma_64x64", "mma_128x128"), 9216, 3072) == "mma_128x128/t1e"
    assert gemm_kernels.invariant(("pingpong_64x128",), 9216, 3072) is None


def test_a_shape_goes_by_the_table_and_without_times_by_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    names = ("pingpong_128x128", "pingpong_64x128")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm_kernels, "configurations", lambda codes, capability: names)
    monkeypatch.setattr(gemm_kernels, "candidate_kernels", lambda codes, device: frozenset((*names, "torch")))
    many = gemm_kernels.shape_of(F8, 4608, 3072, 3072, bias=True, act="gelu_tanh")

    def chosen(tokens: int) -> str:
        return gemm_kernels.chosen(F8, tokens, 3072, 3072, True, "gelu_tanh", device, gemm.candidates)

    table = Choices({"gemm_q fp8 bias+gelu_tanh 3072 3072": {4608: {"torch": 90.0, "pingpong_128x128": 91.0}}})
    monkeypatch.setattr(gemm_kernels, "choices", lambda device: table)
    assert chosen(4608) == chosen(4608) == "torch"
    assert chosen(64) == "pingpong_64x128/c1e"
    # what is measured meanwhile counts, and while shapes are recorded each is asked for
    with table.recorded() as wanted:
        chosen(64)
    assert [shape.size for shape in wanted] == [64]
    ways = {"torch": lambda: 1.0, names[0]: lambda: 2.0}
    table.tune({many: lambda shape, device: ways}, device, 60, lambda call, calls: 3.0 - call())
    assert chosen(4608) == names[0]
    assert gemm_kernels.guess(many, names) == "pingpong_128x128/c1e"
    assert gemm_kernels.guess(many, ()) == "torch"
    monkeypatch.setattr(gemm_kernels, "configurations", lambda codes, capability: ())
    table.memo.clear()
    assert chosen(64) == "torch"


def test_shapes_differ_by_all_that_times_hang_on() -> None:
    made = {
        gemm_kernels.shape_of(codes, 5, outputs, inputs, bias=bias, act=act).family
        for codes in (F8, I8)
        for outputs, inputs in ((16, 32), (32, 16))
        for bias in (False, True)
        for act in gemm.ACTS
    }
    assert len(made) == 16


def test_what_is_measured_is_each_way_once_on_operands_of_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gemm.gemm_q, "overload", lambda *operands: asked.append(operands))
    monkeypatch.setattr(gemm, "candidate_kernels", lambda codes, device: frozenset({"torch", "wide"}))
    shape = gemm_kernels.shape_of(I8, 5, 48, 32, bias=True, act="gelu_tanh")
    calls = gemm.candidates(shape, torch.device("cpu"))
    for call in calls.values():
        call()
    for (x, x_scale, weight, weight_scale, bias, act, dtype, way), name in zip(asked, calls, strict=True):
        assert (x.shape, weight.shape, bias.shape) == ((5, 32), (48, 32), (48,))
        assert (x.dtype, bias.dtype, act, dtype, way) == (I8, BF16, "gelu_tanh", BF16, name)
        assert (len(x_scale), len(weight_scale)) == (5, 48)
    assert sorted(calls) == ["torch", "wide"]


def test_a_card_without_float8_computes_it_by_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(19, 33, 7, F8, F32)
    given = inputs_of(case, "cpu", seed)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert torch.equal(gemm.gemm_q_cuda(*given.operands, "none", F32, "auto"), gemm.gemm_q(*given.operands, dtype=F32))
