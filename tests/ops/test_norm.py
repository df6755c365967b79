"""The norm family: the kernels that this process dispatches to, their references and the two together."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops import norm
from omni_grpc.ops.declare import cell_of
from omni_grpc.ops.norm import gate_add, gate_add_norm_modulate, norm_modulate
from tests.ops.norm_cases import OPS, Case, Inputs, inputs

CPU_KERNELS = ("norm_modulate", "gate_add", "gate_add_norm_modulate")


def test_the_native_kernels_are_dispatched() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so no library")
    made = inputs(Case(4, 16), "cpu", 0)
    made.index[2] = 9
    for op in CPU_KERNELS:
        assert "CPU" in ops.kernels()[op], ops.load_native()
        # Only the kernel names its source file; what the reference calls here, index_select, has words of its own.
        with pytest.raises(RuntimeError, match=rf"csrc/bind/norm\.cpp.*{op}: index holds 9, .* have 2 rows"):
            CALLS[op](made)


@pytest.mark.parametrize("op", OPS)
def test_cuda_kernels_are_named_where_they_are_compiled_in(op: str) -> None:
    assert ("CUDA" in ops.kernels()[op]) == bool(ops.load_native().cuda_archs)


def test_reference_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0], [-5.0, 5.0]])
    scale, shift = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[10.0, 20.0], [0.0, -1.0]])
    index = torch.tensor([0, 1], dtype=torch.int32)
    out = norm_modulate.reference(x, scale, shift, index, eps=0.0)
    torch.testing.assert_close(out, torch.tensor([[9.0, 22.0], [-3.0, 0.0]]))
    weight, bias = torch.tensor([2.0, 3.0]), torch.tensor([0.5, 0.0])
    out = norm_modulate.reference(x, scale, None, index, 0.0, weight, bias, base=0.0)
    torch.testing.assert_close(out, torch.tensor([[0.0, 3.0], [-3.0, 0.0]]))
    out = norm_modulate.reference(torch.tensor([[1.0, 7.0]]), None, None, None, 0.0, weight, rms=True)
    torch.testing.assert_close(out, torch.tensor([[0.4, 4.2]]))
    total = norm.gate_add.reference(x, torch.tensor([[1.0, 7.0], [1.0, 1.0]]), scale, index, 0.0, weight)
    torch.testing.assert_close(total, torch.tensor([[1.0, 7.2], [-1.0, 5.0]]))


def test_a_sum_is_rounded_before_it_is_normed() -> None:
    """2 + 2^-8 is no bfloat16, and 2 - 2^-8 is none either: all channels are alike after the sum, and so nothing."""
    x = torch.full((1, 8), 2.0, dtype=torch.bfloat16)
    y = torch.tensor([[2.0**-8, -(2.0**-9)] * 4], dtype=torch.bfloat16)
    for call in (norm.gate_add_norm_modulate.reference, gate_add_norm_modulate):
        total, out = call(x, y, None, None, None, None, 1e-12)
        assert torch.equal(total, x)
        assert not out.any()


def test_eps_is_used(seed: int) -> None:
    made = inputs(Case(3, 32), "cpu", seed)
    x = made.x * 1e-3
    for eps in (1e-6, 1e-2):
        torch.testing.assert_close(
            norm_modulate(x, *made.modulated, eps), norm_modulate.reference(x, *made.modulated, eps)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_served_by_the_reference(dtype: torch.dtype, seed: int) -> None:
    made = inputs(Case(4, 24), "cpu", seed).of(dtype)
    out = norm_modulate(made.x, *made.modulated)
    assert out.dtype == dtype
    assert torch.equal(out, norm_modulate.reference(made.x, *made.modulated))


def test_mixtures_of_dtypes_are_served_by_the_reference(seed: int) -> None:
    made = inputs(Case(4, 24, kind="all"), "cpu", seed)
    assert made.weight is not None
    weight = made.weight.bfloat16()
    out = norm_modulate(made.x, *made.modulated, weight=weight)
    assert torch.equal(out, norm_modulate.reference(made.x, *made.modulated, weight=weight))
    with pytest.raises(RuntimeError, match="the kernel takes modulation and weights of the same dtype"):
        torch.ops.omni_grpc.norm_modulate(made.x, *made.modulated, weight=weight)


def _gate_add(i: Inputs) -> Any:
    return gate_add(i.x, i.y, i.gate, i.index, y_weight=i.y_weight)


def _gate_add_norm_modulate(i: Inputs) -> Any:
    return gate_add_norm_modulate(i.x, i.y, i.gate, *i.modulated, **i.normed, y_weight=i.y_weight)


CALLS: dict[str, Callable[[Inputs], Any]] = {
    "norm_modulate": lambda i: norm_modulate(i.x, *i.modulated, **i.normed),
    "norm_modulate_quantize": lambda i: norm.norm_modulate_quantize(i.x, *i.modulated, **i.normed, int8=True),
    "gate_add": _gate_add,
    "gate_add_norm_modulate": _gate_add_norm_modulate,
    "gate_add_norm_modulate_quantize": lambda i: norm.gate_add_norm_modulate_quantize(
        i.x, i.y, i.gate, *i.modulated, **i.normed, y_weight=i.y_weight, int8=True
    ),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "case",
    [Case(5, 16, rows=1), Case(4, 24, dtype=torch.bfloat16, kind="all"), Case(6, 128, rows=3, view="slice")],
    ids=str,
)
def test_opcheck(op: str, case: Case, seed: int) -> None:
    made = inputs(case, "cpu", seed)
    normed = (1e-6, made.weight, made.bias, made.rms, made.base)
    args: dict[str, tuple[Any, ...]] = {
        "norm_modulate": (made.x, *made.modulated, *normed),
        "norm_modulate_quantize": (made.x, *made.modulated, *normed, True),
        "gate_add": (made.x, made.y, made.gate, made.index, 1e-6, made.y_weight),
        "gate_add_norm_modulate": (made.x, made.y, made.gate, *made.modulated, *normed, made.y_weight),
        "gate_add_norm_modulate_quantize": (made.x, made.y, made.gate, *made.modulated, *normed, made.y_weight, False),
    }
    torch.library.opcheck(getattr(torch.ops.omni_grpc, op).default, args[op])


@pytest.mark.parametrize("op", OPS)
def test_compiles_whole(op: str, seed: int) -> None:
    made = inputs(Case(5, 48, kind="all"), "cpu", seed)
    compiled = torch.compile(CALLS[op], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(made), CALLS[op](made), rtol=0, atol=0)


WRONG: dict[str, dict[str, Callable[[Tensor], Tensor | None]]] = {
    "x must be [T, C]": {"x": lambda x: x[None]},
    "y must have the shape of x": {"y": lambda y: y[:, 1:]},
    "shift must be [M, C]": {"shift": lambda shift: shift[0]},
    "x has 16 channels and gate 15": {"gate": lambda gate: gate[:, 1:]},
    "x has 16 channels and scale 15": {"scale": lambda scale: scale[:, 1:]},
    "has 2 rows and shift 1": {"shift": lambda shift: shift[:1]},
    "must have the same dtype": {"shift": lambda shift: shift.bfloat16()},
    "weight must be [C] with C = 16": {"weight": lambda weight: weight[1:]},
    "y_weight must be [C] with C = 16": {"y_weight": lambda weight: weight[None]},
    "index must be int32 [T]": {"index": lambda index: index.long()},
    "index has 4 entries for 5 tokens": {"index": lambda index: index[1:]},
    "index is missing": {"index": lambda index: None},
    "must be on one device": {"index": lambda index: index.to("meta")},
}


TAKES = {
    "norm_modulate": {"x", "scale", "shift", "weight", "index"},
    "gate_add": {"x", "y", "gate", "y_weight", "index"},
    "gate_add_norm_modulate": {"x", "y", "gate", "scale", "shift", "weight", "y_weight", "index"},
}


@pytest.mark.parametrize("served", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    ("op", "message"),
    [(op, message) for op in CPU_KERNELS for message, changes in WRONG.items() if changes.keys() <= TAKES[op]],
)
def test_wrong_inputs_are_refused_alike(op: str, message: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = inputs(Case(5, 16, kind="all"), "cpu", 0)
    ((name, change),) = WRONG[message].items()
    wrong = dataclasses.replace(made, **{name: change(getattr(made, name))})
    monkeypatch.setattr(cell_of(getattr(norm, op), "_kernel_if"), "cell_contents", lambda *_: served)
    with pytest.raises(RuntimeError) as caught:
        CALLS[op](wrong)
    assert f"{op}: " in str(caught.value)
    assert message in str(caught.value)


def test_an_index_outside_of_the_rows_is_refused() -> None:
    made = inputs(Case(5, 16), "cpu", 0)
    for index in (made.index + 2, made.index - 1):
        for op in OPS:
            with pytest.raises((RuntimeError, IndexError)):
                CALLS[op](dataclasses.replace(made, index=index))
