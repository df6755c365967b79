"""norm_modulate: the kernel that this process dispatches to, its reference and the two together."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops.norm import norm_modulate, norm_modulate_reference
from tests.ops.norm_cases import CASES, CHECKS, CUDA_CHECKS, Case, check_case, inputs

OP = torch.ops.omni_grpc.norm_modulate.default
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def seed() -> int:
    return secrets.randbelow(2**32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case, seed: int) -> None:
    check_case(case, "cpu", seed)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Callable[[str, int], None], seed: int) -> None:
    check("cpu", seed)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_matches_float64(case: Case, seed: int) -> None:
    check_case(case, "cuda", seed)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("check", CUDA_CHECKS, ids=lambda check: check.__name__)
def test_cuda_check(check: Callable[[str, int], None], seed: int) -> None:
    check("cuda", seed)


@pytest.mark.gpu
@CUDA
def test_cuda_kernel_is_built() -> None:
    assert "CUDA" in ops.kernels()["norm_modulate"], ops.load_native()


def test_the_native_kernel_is_dispatched() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so no library")
    assert "CPU" in ops.kernels()["norm_modulate"], ops.load_native()
    x, scale, shift, index = inputs(Case(4, 16), "cpu", 0)
    index[2] = 9
    # Only the kernel names its source file; what the reference calls here, index_select, has words of its own.
    with pytest.raises(RuntimeError, match=r"csrc/bind/norm\.cpp.*index holds 9, scale and shift have 2 rows"):
        norm_modulate(x, scale, shift, index)


def test_cuda_kernels_are_named_where_they_are_compiled_in() -> None:
    assert ("CUDA" in ops.kernels()["norm_modulate"]) == bool(ops.load_native().cuda_archs)


def test_reference_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0], [-5.0, 5.0]])
    scale, shift = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[10.0, 20.0], [0.0, -1.0]])
    out = norm_modulate_reference(x, scale, shift, torch.tensor([0, 1], dtype=torch.int32), eps=0.0)
    torch.testing.assert_close(out, torch.tensor([[9.0, 22.0], [-3.0, 0.0]]))


def test_eps_is_used(seed: int) -> None:
    x, scale, shift, index = inputs(Case(3, 32), "cpu", seed)
    x = x * 1e-3
    for eps in (1e-6, 1e-2):
        torch.testing.assert_close(
            norm_modulate(x, scale, shift, index, eps), norm_modulate_reference(x, scale, shift, index, eps)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_served_by_the_reference(dtype: torch.dtype, seed: int) -> None:
    x, scale, shift, index = (t if t.dtype == torch.int32 else t.to(dtype) for t in inputs(Case(4, 24), "cpu", seed))
    out = norm_modulate(x, scale, shift, index)
    assert out.dtype == dtype
    assert torch.equal(out, norm_modulate_reference(x, scale, shift, index))


@pytest.mark.parametrize(
    "case",
    [Case(5, 16), Case(5, 16, rows=1), Case(4, 24, dtype=torch.bfloat16), Case(6, 128, rows=3, view="slice")],
    ids=str,
)
def test_opcheck(case: Case, seed: int) -> None:
    torch.library.opcheck(OP, inputs(case, "cpu", seed))


def test_compiles_whole(seed: int) -> None:
    args = inputs(Case(5, 48), "cpu", seed)
    compiled = torch.compile(norm_modulate, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), norm_modulate(*args))


def _wrong(**changes: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    names = ("x", "scale", "shift", "index")
    values = inputs(Case(5, 16), "cpu", 0)
    return tuple(changes.get(name, lambda same: same)(value) for name, value in zip(names, values, strict=True))


WRONG = {
    "x must be [T, C]": {"x": lambda x: x[None]},
    "scale and shift must be [M, C]": {"shift": lambda shift: shift[0]},
    "x has 16 channels, scale 15 and shift 16": {"scale": lambda scale: scale[:, 1:]},
    "scale has 2 rows and shift 1": {"shift": lambda shift: shift[:1]},
    "they must be alike": {"scale": lambda scale: scale.bfloat16()},
    "index must be int32 [T]": {"index": lambda index: index.long()},
    "index has 4 entries for 5 tokens": {"index": lambda index: index[1:]},
    "must be on one device": {"index": lambda index: index.to("meta")},
}


@pytest.mark.parametrize("function", [norm_modulate, norm_modulate_reference])
@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs_are_refused_alike(message: str, function: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError) as caught:
        function(*_wrong(**WRONG[message]))
    assert "norm_modulate: " in str(caught.value)
    assert message in str(caught.value)


def test_an_index_outside_of_the_rows_is_refused() -> None:
    for change in (lambda index: index + 2, lambda index: index - 1):
        with pytest.raises((RuntimeError, IndexError)):
            norm_modulate(*_wrong(index=change))
