"""compare_store: the kernel that this process dispatches to, its reference and the two together."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch

from omni_grpc import ops
from omni_grpc.ops.cache import compare_store
from tests.ops.cache_cases import Case, check_case, inputs

OP = torch.ops.omni_grpc.compare_store.default


def test_the_native_kernel_is_dispatched() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so no library")
    assert "CPU" in ops.kernels()["compare_store"], ops.load_native()


def test_reference_by_hand() -> None:
    now = torch.tensor([[1.0, -2.0], [3.0, 3.0], [5.0, 5.0]])
    before = [torch.tensor([[2.0, -4.0]]), torch.full((2, 2), torch.nan)]
    assert compare_store.reference(now, before, [0, 1, 3], [1, 0]).tolist() == [[3.0, 6.0], [0.0, 0.0]]
    assert torch.equal(torch.cat(before), now)


def test_other_dtypes_are_served_by_the_reference(seed: int) -> None:
    check_case(Case((3, 4), 8, torch.float64), "cpu", seed)


@pytest.mark.parametrize("case", [Case((5, 3), 16), Case((4,), 24, torch.bfloat16)], ids=str)
def test_opcheck(case: Case, seed: int) -> None:
    now, before, offsets, known = inputs(case, "cpu", seed)
    before = [
        torch.ones_like(now[offsets[row] : offsets[row + 1]]) if not memory.numel() else memory.nan_to_num()
        for row, memory in enumerate(before)
    ]
    torch.library.opcheck(OP, (now, before, offsets, [1] * len(known)))


NOW = torch.zeros(5, 2)


@pytest.mark.parametrize("function", [compare_store, compare_store.reference])
@pytest.mark.parametrize(
    ("message", "arguments"),
    {
        "now must be [T, C]": (NOW[0], [], [0], []),
        "1 rows, 1 offsets and 1 known": (NOW, [NOW], [0], [1]),
        "row 0 is 0 to 6 of 5 tokens": (NOW, [NOW], [0, 6], [1]),
        "row 1 is 4 to 3 of 5 tokens": (NOW, [NOW[:4].clone(), NOW[:0]], [0, 4, 3], [1, 1]),
        "before 0 must be of the dtype": (NOW, [NOW.bfloat16()], [0, 5], [1]),
        "before 0 must be contiguous with 4 x 2": (NOW, [NOW], [0, 4], [1]),
        "before 0 must be contiguous with 5 x 2": (NOW, [torch.zeros(2, 5).t()], [0, 5], [1]),
    }.items(),
)
def test_wrong_inputs_are_refused_alike(message: str, arguments: tuple, function: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError, match=r"compare_store: ") as caught:
        function(*arguments)
    assert message in str(caught.value)
