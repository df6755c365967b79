"""qk_norm_rope: the kernel that this process dispatches to, its reference and the two together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc.ops.quant import LARGEST
from omni_grpc.ops.rope import Heads, qk_norm_rope, qk_norm_rope_op, qk_norm_rope_quantize
from tests.ops.rope_cases import (
    CODE_CASES,
    Case,
    Inputs,
    apply,
    check_codes,
    inputs,
)

OP = torch.ops.omni_grpc.qk_norm_rope.default
QUANTIZE = torch.ops.omni_grpc.qk_norm_rope_quantize.default


@pytest.mark.parametrize("codes", LARGEST, ids=str)
@pytest.mark.parametrize("case", CODE_CASES, ids=str)
def test_codes(case: Case, codes: torch.dtype, seed: int) -> None:
    check_codes(case, codes, "cpu", seed)


def test_the_native_kernel_is_dispatched() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so no library")
    given = inputs(Case(), "cpu", 0)
    given.place[1][2] = 99
    # Only the kernel names its source file; torch's own words for the same are others.
    with pytest.raises(RuntimeError, match=r"csrc/bind/rope\.cpp.*place holds 99, there are 14 tokens"):
        apply(Case(), given)


def test_by_hand() -> None:
    q, k, v = (
        torch.tensor([[[3.0, 4.0]], [[1.0, -1.0]]]),
        torch.tensor([[[0.0, 2.0]], [[5.0, 5.0]]]),
        torch.ones(2, 1, 2),
    )
    table = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # the first position turns nothing, the second a quarter
    weights = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    place = [torch.tensor([1, 0], dtype=torch.int32)]
    got = qk_norm_rope([Heads(q, k, v, weights)], table, place, norm="rms", eps=0.0)
    root = 12.5**0.5
    torch.testing.assert_close(got[0], torch.tensor([[[1.0, -2.0]], [[-8 / root, 3 / root]]]))
    torch.testing.assert_close(got[1], torch.tensor([[[1.0, 1.0]], [[-(2.0**0.5), 0.0]]]))


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """A pair of channels is a complex number, and its turn a product."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table)[:, None]).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_norm_it_is_the_rotation(dtype: torch.dtype, seed: int) -> None:
    case = Case((9,), norm="none", affine="", dtype=dtype, placed=False)
    given = inputs(case, "cpu", seed)
    q, k, v = apply(case, given)
    (stream,) = given.streams
    assert given.table is not None
    torch.testing.assert_close(q, _turned(stream.q, given.table))
    torch.testing.assert_close(k, _turned(stream.k, given.table))
    assert v is stream.v


@pytest.mark.parametrize("norm", ["rms", "rms_across", "layer"])
def test_eps_is_used(norm: str, seed: int) -> None:
    case = Case(norm=norm)
    given = inputs(case, "cpu", seed)
    small = [stream._replace(q=stream.q * 1e-3, k=stream.k * 1e-3) for stream in given.streams]
    for eps in (1e-6, 1e-2):
        out = qk_norm_rope(small, given.table, given.place, norm=norm, eps=eps)
        exact = Inputs(small, given.table, given.place).double()
        want = qk_norm_rope(exact.streams, exact.table, exact.place, norm=norm, eps=eps)
        torch.testing.assert_close(out[0].double(), want[0], rtol=1e-4, atol=1e-5)


def test_other_dtypes_are_served_by_the_reference(seed: int) -> None:
    case = Case(dtype=torch.float16)
    given = inputs(case, "cpu", seed)
    out, exact = apply(case, given), apply(case, given.double())
    assert out[0].dtype == torch.float16
    torch.testing.assert_close(out[0].double(), exact[0], rtol=2**-10, atol=1e-4)


def _operands(case: Case, given: Inputs) -> tuple[Any, ...]:
    streams = given.streams
    affine = [[x for stream in streams for x in group(stream)] for group in (lambda s: s.weights, lambda s: s.biases)]
    parts = [[stream[which] for stream in streams] for which in range(3)]
    return *parts, *affine, given.table, given.place, case.norm, case.pairs, 1e-6


@pytest.mark.parametrize(
    "case", [Case(), Case(dtype=torch.bfloat16, norm="rms_across", pairs="half"), Case((6,), placed=False)], ids=str
)
def test_opcheck(case: Case, seed: int) -> None:
    operands = _operands(case, inputs(case, "cpu", seed))
    torch.library.opcheck(OP, operands)
    torch.library.opcheck(QUANTIZE, (*operands, torch.int8))


def test_compiles_whole(seed: int) -> None:
    given = inputs(Case(), "cpu", seed)
    compiled = torch.compile(qk_norm_rope, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(
        compiled(given.streams, given.table, given.place, norm="rms"), apply(Case(), given), strict=True
    ):
        assert torch.equal(mine, eager)


def _stream(**changes: Callable[[Tensor], Any]) -> Callable[[Inputs], None]:
    """Changes the second stream."""

    def change(given: Inputs) -> None:
        second = given.streams[1]
        given.streams[1] = second._replace(**{name: edit(getattr(second, name)) for name, edit in changes.items()})

    return change


def _place(edit: Callable[[Tensor], Tensor]) -> Callable[[Inputs], None]:
    def change(given: Inputs) -> None:
        given.place[1] = edit(given.place[1])

    return change


def _table(edit: Callable[[Tensor], Tensor]) -> Callable[[Inputs], None]:
    def change(given: Inputs) -> None:
        assert given.table is not None
        given.table = edit(given.table)

    return change


WRONG: dict[str, Callable[[Inputs], None]] = {
    "q, k and v must be [T, H, D]": _stream(q=lambda q: q.flatten(1)),
    "all streams must have the same heads": _stream(q=lambda q: q[..., 1:]),
    "k must be (9, 4, 64)": _stream(k=lambda k: k[1:]),
    "v must be (9, 4, 64)": _stream(v=lambda v: v[:, 1:]),
    "q, k and v must have the same dtype": _stream(k=lambda k: k.bfloat16()),
    "weights must have 64 channels": _stream(weights=lambda w: (w[0], w[1][1:])),
    "weights must be one for q and one for k of each of 2 streams, got 3": _stream(weights=lambda w: w[:1]),
    "weights must have the same dtype": _stream(weights=lambda w: (w[0], w[1].bfloat16())),
    "place must be int32 [T_s]": _place(lambda place: place.long()),
    "place has 1 entries for 2 streams": lambda given: given.place.pop(),
    "table must be float32 [T, R, 2]": _table(lambda table: table[..., :1]),
    "table has 13 rows for 14 tokens": _table(lambda table: table[1:]),
    "table has 64 pairs, heads have 64 channels": _table(lambda table: torch.cat([table, table], 1)),
    "must be on one device": _place(lambda place: place.to("meta")),
    "q, k and v must be 1 to 8 streams, got 10": lambda given: given.streams.extend(given.streams * 4),
}


@pytest.mark.parametrize("function", [OP, qk_norm_rope_op.reference])
@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs_are_refused_alike(message: str, function: Callable[..., Any]) -> None:
    given = inputs(Case(), "cpu", 0)
    WRONG[message](given)
    with pytest.raises(RuntimeError) as caught:
        function(*_operands(Case(), given))
    assert "qk_norm_rope: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [OP, qk_norm_rope_op.reference])
def test_unknown_kinds_and_weights_without_a_norm_are_refused(function: Callable[..., Any]) -> None:
    given = inputs(Case(), "cpu", 0)
    for changes, message in (
        ({"norm": "batch"}, "norm must be one of none, rms, rms_across, layer, got batch"),
        ({"pairs": "odd"}, "pairs must be one of interleaved, half, got odd"),
        ({"norm": "none"}, "weights are given without a norm"),
    ):
        *operands, norm, pairs, eps = _operands(Case(), given)
        with pytest.raises(RuntimeError, match=message):
            function(*operands, changes.get("norm", norm), changes.get("pairs", pairs), eps)


def test_codes_of_other_dtypes_are_refused(seed: int) -> None:
    given = inputs(Case(), "cpu", seed)
    with pytest.raises(RuntimeError, match=r"codes must be float8_e4m3fn or int8, got torch\.uint8"):
        qk_norm_rope_quantize(given.streams, given.table, given.place, codes=torch.uint8, norm="rms")
