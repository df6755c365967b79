"""guide_step: the kernel that this process dispatches to, its reference and the two together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from omni_grpc.ops.step import GuidanceNormCode, OutputStep, guide_step, guide_step_op
from tests.ops.step_cases import KINDS, Case, check_case, inputs

OP = torch.ops.omni_grpc.guide_step.default


def test_by_hand() -> None:
    prediction = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, -1.0]])
    latents = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    guided = OutputStep(cond=0, uncond=1, latents=0, tokens=1, width=-0.5, scale=2.0)
    plain = OutputStep(
        cond=2, uncond=None, latents=1, tokens=1, width=-0.5, scale=9.0, rescale=1.0, norm=GuidanceNormCode.RENORM
    )
    moved = guide_step(prediction, latents, [guided, plain])
    assert [x.tolist() for x in moved.guided] == [[[6.0, 8.0]], [[1.0, -1.0]]]
    assert [x.tolist() for x in moved.latents] == [[[-2.0, -3.0]], [[1.5, 2.5]]]


def test_other_dtypes_are_served_by_the_reference(seed: int) -> None:
    check_case(Case(KINDS, 16, torch.float64, torch.float64), "cpu", seed)
    prediction, latents, moves = inputs(Case(KINDS, 16), "cpu", seed)
    assert guide_step(prediction.half(), latents, moves).latents[0].dtype == torch.float16


def numbers(moves: list[OutputStep]) -> tuple[list[int], list[float]]:
    places = [
        at for it in moves for at in (it.cond, -1 if it.uncond is None else it.uncond, it.latents, it.tokens, it.norm)
    ]
    return places, [factor for it in moves for factor in (it.scale, it.rescale, it.width)]


@pytest.mark.parametrize("case", [Case(KINDS, 16), Case((KINDS[0],), 8, torch.bfloat16)], ids=str)
def test_opcheck(case: Case, seed: int) -> None:
    prediction, latents, moves = inputs(case, "cpu", seed)
    torch.library.opcheck(OP, (prediction, latents, *numbers(moves)))


X = torch.zeros(4, 2)
FINE = [0, 2, 0, 2, 0], [1.0, 0.0, -0.1]


@pytest.mark.parametrize("function", [OP, guide_step_op.reference])
@pytest.mark.parametrize(
    ("message", "arguments"),
    {
        "prediction and latents must be [T, C] and [L, C]": (X[0], X, *FINE),
        "must be [T, C] and [L, C], got": (X, X[:, :1], *FINE),
        "5 places and 2 factors": (X, X, FINE[0], [1.0, 2.0]),
        "output 0 lies outside": (X, X, [3, 0, 0, 2, 0], FINE[1]),
        "output 1 lies outside": (X, X, [*FINE[0], 0, 3, 0, 2, 0], FINE[1] * 2),
    }.items(),
)
def test_wrong_inputs_are_refused(message: str, arguments: tuple, function: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError, match=r"guide_step: ") as caught:
        function(*arguments)
    assert message in str(caught.value)
