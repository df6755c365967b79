"""The quant family: the kernels that this process dispatches to, their references and the two together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops import quant
from omni_grpc.ops.declare import cell_of
from tests.ops.quant_cases import CODES, OPS, Case, inputs


@pytest.mark.parametrize("op", OPS)
def test_cuda_kernels_are_named_where_they_are_compiled_in(op: str) -> None:
    assert ("CUDA" in ops.kernels()[op]) == bool(ops.load_native().cuda_archs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_the_cpu_kernel_gives_the_bits_of_the_reference(codes: torch.dtype, dtype: torch.dtype, seed: int) -> None:
    """Magnitudes of all sizes in each row, those that e4m3 has no exponent for among them, and middles of two codes."""
    assert ("CPU" in ops.kernels()["quantize_rows"]) == ops.load_native().loaded
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(37, 517, generator=generator) * torch.rand(37, 517, generator=generator) ** 8
    x = (x * torch.logspace(-30, 30, 37)[:, None]).to(dtype)
    x[:, 0], x[5] = x.abs().amax(1), torch.arange(517).to(dtype) - 258.5
    for rows in (x, x[:, 3:400], x[::2]):
        made, expected = (
            quant.quantize_rows(rows, codes),
            quant.quantize_rows_op.reference(rows, None, codes == torch.int8),
        )
        assert torch.equal(made[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(made[1], expected[1])


def test_codes_by_hand() -> None:
    x = torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0], [-254.0, 3.0, 1.0]])
    codes, scales = quant.quantize_rows(x, torch.int8)
    assert codes.tolist() == [[127, -50, 0], [0, 0, 0], [-127, 2, 0]]
    torch.testing.assert_close(scales, torch.tensor([0.01, 0.0, 2.0]))
    codes, scales = quant.quantize_rows(torch.tensor([[896.0, -2.0, 0.5, 37.0]]), torch.float8_e4m3fn)
    assert codes.float().tolist() == [[448.0, -1.0, 0.25, 18.0]]  # 18.5 lies between 18 and 20
    assert scales.tolist() == [2.0]


def test_a_value_is_quantised_before_it_is_rounded() -> None:
    """silu(x) * up in bfloat16 would be 1 in both channels; the codes tell them apart."""
    x, up = torch.full((1, 2), 30.0), torch.tensor([[1.0 / 30, 0.995 / 30]])
    codes, _ = quant.silu_mul_quantize_rows(x, up, True)
    assert codes.tolist() == [[127, 126]]


def test_rows_are_taken_by_an_index_to_the_bit(seed: int) -> None:
    x = inputs(Case(9, 40), "cpu", seed)[0]
    index = torch.tensor([8, 0, 0, 3], dtype=torch.int32)
    for codes in CODES:
        taken, whole = quant.quantize_rows(x, codes, index), quant.quantize_rows(x, codes)
        assert torch.equal(taken[0].view(torch.uint8), whole[0].view(torch.uint8)[index])
        assert torch.equal(taken[1], whole[1][index])


@pytest.mark.parametrize("index", [[0, 9], [-1, 0]])
def test_a_row_that_is_not_there_is_refused(index: list[int]) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"index holds|out of range|out of bounds"):
        quant.quantize_rows(torch.zeros(9, 8), torch.int8, torch.tensor(index, dtype=torch.int32))


@pytest.mark.parametrize("served", [True, False])
def test_a_wrong_index_is_refused_alike(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_of(quant.quantize_rows_op, "_kernel_if"), "cell_contents", lambda x: served)
    x = torch.zeros(9, 8)
    for message, index in {
        "index must be int32 [S]": torch.tensor([1, 2]),
        "index must be int32 [S] and": torch.zeros(2, 2, dtype=torch.int32),
        "int32 [S] and contiguous": torch.zeros(6, dtype=torch.int32)[::2],
        "x and index must be on one device": torch.zeros(2, dtype=torch.int32, device="meta"),
    }.items():
        with pytest.raises(RuntimeError) as caught:
            quant.quantize_rows(x, torch.int8, index)
        assert "quantize_rows: " in str(caught.value)
        assert message in str(caught.value)
    alone = torch.tensor([4, 0, 7], dtype=torch.int32)[::3]
    assert quant.quantize_rows(x, torch.int8, alone)[0].shape == (1, 8)


def test_what_is_beside_keeps_its_bits(seed: int) -> None:
    x, y = inputs(Case(5, 24, torch.bfloat16), "cpu", seed)[0], inputs(Case(5, 56, torch.bfloat16), "cpu", seed)[1]
    made = quant.concat_gelu_tanh(x, y)
    assert torch.equal(made, torch.cat([x, quant.gelu_tanh(y)], 1))


def test_the_activations_are_torchs(seed: int) -> None:
    x, up = inputs(Case(9, 200), "cpu", seed)
    torch.testing.assert_close(quant.gelu_tanh(x), torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(quant.silu_mul(x, up), torch.nn.functional.silu(x) * up)
    far = torch.tensor([[-torch.inf, -200.0, -100.0, 0.0, 100.0, 200.0, torch.inf, torch.nan]])
    ones = torch.ones_like(far)
    torch.testing.assert_close(
        quant.silu_mul(far, ones)[:, 1:], torch.nn.functional.silu(far)[:, 1:], equal_nan=True, atol=1e-30, rtol=1e-6
    )


def test_another_dtype_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float8_e4m3fn or torch\.int8, not to torch\.uint8"):
        quant.quantize_rows(torch.zeros(2, 8), torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_served_by_the_reference(dtype: torch.dtype, seed: int) -> None:
    x, up = (tensor.to(dtype) for tensor in inputs(Case(4, 24), "cpu", seed))
    assert torch.equal(quant.silu_mul(x, up), quant.silu_mul.reference(x, up))
    assert quant.silu_mul(x, up).dtype == dtype
    for codes in CODES:
        assert quant.quantize_rows(x, codes)[1].dtype == torch.float32


ARGS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "concat_gelu_tanh": lambda x, up: (x, up[:, :8]),
    "concat_gelu_tanh_quantize_rows": lambda x, up: (x, up[:, :8], True),
    "gelu_tanh": lambda x, up: (x,),
    "gelu_tanh_quantize_rows": lambda x, up: (x, False),
    "quantize_rows": lambda x, up: (x, torch.tensor([1, 0, 1], dtype=torch.int32), True),
    "silu_mul": lambda x, up: (x, up),
    "silu_mul_quantize_rows": lambda x, up: (x, up, True),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", [Case(5, 16), Case(4, 24, torch.bfloat16, "up|gate")], ids=str)
def test_opcheck(op: str, case: Case, seed: int) -> None:
    torch.library.opcheck(getattr(torch.ops.omni_grpc, op).default, ARGS[op](*inputs(case, "cpu", seed)))


def test_compiles_whole(seed: int) -> None:
    def everything(x: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (
            quant.gelu_tanh(x),
            quant.silu_mul(x, up),
            *quant.quantize_rows(x, torch.int8),
            *quant.concat_gelu_tanh_quantize_rows(x, up[:, 16:], True),
            *quant.silu_mul_quantize_rows(x, up, True),
        )

    args = inputs(Case(5, 48), "cpu", seed)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), everything(*args), rtol=0, atol=0)


@pytest.mark.parametrize("function", [quant.concat_gelu_tanh, quant.concat_gelu_tanh.reference])
def test_what_cannot_be_beside_is_refused_alike(function: Callable[..., Tensor]) -> None:
    x = torch.zeros(3, 8)
    for message, arguments in {
        "x must be [T, C]": (x[0], x),
        "y must have as many rows as x": (x, x[1:]),
        "must have the same dtype": (x, x.bfloat16()),
        "x and y must be on one device": (x, x.to("meta")),
    }.items():
        with pytest.raises(RuntimeError) as caught:
            function(*arguments)
        assert "concat_gelu_tanh: " in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize("function", [quant.silu_mul, quant.silu_mul.reference])
def test_wrong_inputs_are_refused_alike(function: Callable[..., Tensor]) -> None:
    x = torch.zeros(3, 8)
    for message, arguments in {
        "x must be [T, C]": (x[0], x),
        "up must have the shape of x": (x, x[:, 1:]),
        "must have the same dtype": (x, x.bfloat16()),
        "must be on one device": (x, x.to("meta")),
    }.items():
        with pytest.raises(RuntimeError) as caught:
            function(*arguments)
        assert "silu_mul: " in str(caught.value)
        assert message in str(caught.value)
