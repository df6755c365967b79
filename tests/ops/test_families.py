"""Every family of ops: what this process dispatches to against the family's definition, `<family>_cases.py`.

What a family has besides is in `test_<family>.py`. tools/gpu_test.py runs the same cases where there is no pytest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from omni_grpc import ops
from tools.gpu_test import families, without_kernel

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MARKS = {"host": [pytest.mark.skipif(not ops.load_native().loaded, reason="no op library")]}
MODULES = {family: importlib.import_module(f"tests.ops.{family}_cases") for family in families()}


def params(what: str, marks: list[pytest.MarkDecorator], name: Callable[[Any], str] = str) -> list[Any]:
    """(the family's module, one entry of its list `what`)."""
    return [
        pytest.param(module, entry, id=f"{family}-{name(entry)}", marks=[*marks, *MARKS.get(family, [])])
        for family, module in MODULES.items()
        for entry in getattr(module, what)
    ]


def named(check: Callable[[str, int], None]) -> str:
    return check.__name__


@pytest.mark.parametrize(("family", "case"), params("CASES", []))
def test_case(family: ModuleType, case: Any, seed: int) -> None:
    family.check_case(case, "cpu", seed)


@pytest.mark.parametrize(("family", "check"), params("CHECKS", [], named))
def test_check(family: ModuleType, check: Callable[[str, int], None], seed: int) -> None:
    check("cpu", seed)


@pytest.mark.parametrize(("family", "case"), params("CASES", CUDA))
def test_cuda_case(family: ModuleType, case: Any, seed: int) -> None:
    family.check_case(case, "cuda", seed)


@pytest.mark.parametrize(("family", "check"), params("CUDA_CHECKS", CUDA, named))
def test_cuda_check(family: ModuleType, check: Callable[[str, int], None], seed: int) -> None:
    check("cuda", seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_kernels_are_built() -> None:
    assert without_kernel() == [], ops.load_native()


@pytest.mark.skipif(not ops.load_native().cuda_archs, reason="no CUDA kernels are compiled in")
def test_every_op_that_is_to_have_one_names_a_cuda_kernel() -> None:
    assert without_kernel() == []


WITHOUT_CPU_KERNEL = {
    *("attention_q", "attention_quantize", "quantize_heads", "varlen_attention", "varlen_attention_quantized"),
    *(
        "gemm_q_configured",
        "lora_merge",
        "qk_norm_rope_quantize_heads",
        "qk_norm_rope_quantize_tiles",
        "qk_norm_rope_quantize",
    ),
}
"""Ops of codes that only a GPU multiplies, those that hand a call on, and one that a CPU has no use for."""


@pytest.mark.skipif(not ops.load_native().loaded, reason="no op library")
def test_every_other_op_has_a_cpu_kernel() -> None:
    assert {op for op, keys in ops.kernels().items() if "CPU" not in keys} == WITHOUT_CPU_KERNEL
