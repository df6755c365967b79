"""What `@op` makes of a function: its schema, its reference and the callable that dispatches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from omni_grpc.ops import declare, norm
from omni_grpc.ops.declare import Size, schema_of


def scaled(
    x: Tensor,
    parts: Sequence[Tensor],
    index: Tensor | None,
    at: Sequence[int],
    factor: float = 1e-6,
    kind: str = "a'b",
    *,
    count: Size,
    dtype: torch.dtype = torch.float32,
    fast: bool = False,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def test_a_schema_is_the_signature_with_the_defaults_that_it_can_have() -> None:
    assert schema_of(scaled, mutates=("x", "parts")) == (
        "(Tensor(a!) x, Tensor(b!)[] parts, Tensor? index, int[] at, float factor, str kind, SymInt count, "
        "ScalarType dtype, bool fast=False) -> (Tensor, Tensor)"
    )


def test_results_are_a_tensor_a_list_or_nothing() -> None:
    def one(x: Tensor, eps: float = 0.5, name: str = "it") -> Tensor:
        return x

    def several(x: Tensor) -> list[Tensor]:
        return [x]

    def nothing(x: Tensor, number: int) -> None: ...

    assert schema_of(one) == "(Tensor x, float eps=0.5, str name='it') -> Tensor"
    assert schema_of(several) == "(Tensor x) -> Tensor[]"
    assert schema_of(nothing) == "(Tensor x, int number) -> ()"


def test_an_annotation_without_a_type_in_schemas_is_refused() -> None:
    def wrong(x: Tensor, table: dict[str, int]) -> Tensor:
        return x

    with pytest.raises(KeyError):
        schema_of(wrong)


@pytest.mark.parametrize("served", [True, False])
def test_the_callable_asks_for_what_it_is_told_and_passes_all_by_position(served: bool) -> None:
    asked: list[tuple[object, ...]] = []

    def kernel_if(*given: object) -> bool:
        asked.append(given)
        return served

    called = declare._dispatching(
        scaled, lambda *a: ("kernel", *a), lambda *a: ("reference", *a), kernel_if, ("index", "factor"), None
    )
    made = called(1, 2, 3, 4, count=5)
    assert made == ("kernel" if served else "reference", 1, 2, 3, 4, 1e-6, "a'b", 5, torch.float32, False)
    assert asked == [(3, 1e-6)]
    assert not called.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)


def test_a_reference_takes_keyword_only_parameters_by_position(seed: int) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    by_name = norm.norm_modulate_quantize(x.double(), None, None, None, int8=True)
    by_position = norm.norm_modulate_quantize.reference(
        x.double(), None, None, None, 1e-6, None, None, False, 1.0, True
    )
    assert all(torch.equal(*pair) for pair in zip(by_name, by_position, strict=True))
