"""lora_add: the kernel that this process dispatches to, its reference and the two together."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_grpc import ops
from omni_grpc.ops.lora import MOST_PARTS, MOST_RUNS, LoraPlan, lora_add, lora_add_op
from tests.ops.lora_cases import Case, check_case, inputs

OP = torch.ops.omni_grpc.lora_add.default
HEADER = Path(__file__).resolve().parents[2] / "csrc" / "common" / "lora.h"


def test_the_native_kernel_is_dispatched() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so no library")
    assert "CPU" in ops.kernels()["lora_add"], ops.load_native()


def test_the_kernels_have_the_same_limits() -> None:
    found = dict(re.findall(r"constexpr int (kLora\w+) = (\d+);", HEADER.read_text()))
    assert (int(found["kLoraRuns"]), int(found["kLoraParts"])) == (MOST_RUNS, MOST_PARTS)


@pytest.mark.parametrize("add", [lora_add_op, lora_add_op.reference])
def test_by_hand(add: Callable[..., None]) -> None:
    y = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [torch.inf, 0.0, 0.0]])
    down, up, vector = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[2.0]]), torch.tensor([8.0, 16.0])
    # the first token gets the second output twice 1 + 3 at half the scale, the second one the vector
    add(y, x, None, [down, up, vector], [0, 1, 1, 1, 1, 1], [0, 1, 1, -1, 2, 0], [0.5, 0.25], False)
    assert y.tolist() == [[1.0, 5.0], [3.0, 5.0], [1.0, 1.0]]


def test_gelu_is_that_of_all_tokens() -> None:
    y = torch.tensor([[-1.0, 2.0], [0.5, 0.0]])
    want = torch.nn.functional.gelu(y, approximate="tanh")
    lora_add(y, torch.zeros(2, 4), None, LoraPlan.of([(1, 1, [(None, torch.zeros(2), 0, 1.0)])]), gelu=True)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def test_a_factor_that_several_runs_have_is_passed_once() -> None:
    down, up, vector = torch.zeros(1, 3), torch.zeros(2, 1), torch.zeros(2)
    plan = LoraPlan.of([(0, 2, [(down, up, 0, 1.0)]), (2, 3, []), (5, 1, [(down, up, 0, 0.5), (None, vector, 0, 2.0)])])
    assert [id(factor) for factor in plan.factors] == [id(down), id(up), id(vector)]
    assert (plan.runs, plan.parts) == ([0, 2, 1, 2, 3, 0, 5, 1, 2], [0, 1, 0, 0, 1, 0, -1, 2, 0])
    assert (plan.scales, plan.fits) == ([1.0, 0.5, 2.0], True)
    assert not LoraPlan.of([(0, 2, [(down, up, 0, 1.0)] * (MOST_PARTS + 1))]).fits


def test_other_dtypes_are_served_by_the_reference(seed: int) -> None:
    check_case(Case((3, 4), 8, 8, dtype=torch.float64), "cpu", seed)


@pytest.mark.parametrize(
    "case", [Case((5, 3), 16, 8, (4, 2), 2), Case((4,), 24, 8, dtype=torch.bfloat16, codes=torch.int8)], ids=str
)
def test_opcheck(case: Case, seed: int) -> None:
    y, x, scale, runs = inputs(case, "cpu", seed)
    plan = LoraPlan.of(runs)
    torch.library.opcheck(OP, (y, x, scale, plan.factors, plan.runs, plan.parts, plan.scales, case.gelu))


Y, X, DOWN, UP = torch.zeros(5, 2), torch.zeros(5, 3), torch.zeros(1, 3), torch.zeros(2, 1)


@pytest.mark.parametrize("function", [lora_add_op, lora_add_op.reference])
@pytest.mark.parametrize(
    ("message", "arguments"),
    {
        "y and x must be [T, N] and [T, K]": (Y, X[:4], None, [], [], [], []),
        "x must be of y's dtype": (Y, X.bfloat16(), None, [], [], [], []),
        "or int8 with a scale": (Y, X, torch.ones(5), [], [], [], []),
        "scale must be float32 [T]": (Y, X.to(torch.int8), torch.ones(4), [], [], [], []),
        "factors in its dtype": (Y, X, None, [DOWN.bfloat16(), UP], [0, 5, 1], [0, 1, 0], [1.0]),
        "3 of parts and 1 scales do not match": (Y, X, None, [DOWN, UP], [0, 5, 2], [0, 1, 0], [1.0]),
        "run 0 lies outside of 5 tokens": (Y, X, None, [], [2, 4, 0], [], []),
        "run 1 lies outside of 5 tokens, or before the end": (Y, X, None, [], [0, 3, 0, 2, 1, 0], [], []),
        "part 0 does not fit 3 inputs and 2 outputs": (Y, X, None, [DOWN, UP], [0, 5, 1], [0, 1, 1], [1.0]),
        "part 0 does not fit 3 inputs": (Y, X, None, [UP, UP], [0, 5, 1], [0, 1, 0], [1.0]),
        "part 0 does not fit": (Y, X, None, [DOWN, UP], [0, 5, 1], [-1, 1, 0], [1.0]),
        "part 0 does not": (Y, X, None, [DOWN, UP], [0, 5, 1], [0, 2, 0], [1.0]),
    }.items(),
)
def test_wrong_inputs_are_refused_alike(message: str, arguments: tuple, function: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError, match=r"lora_add: ") as caught:
        function(*arguments, False)
    assert message in str(caught.value)
