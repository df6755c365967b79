"""What a kernel of the step family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omni_grpc.ops.step import GuidanceNormCode, OutputStep, StepResult, guide, guide_step

F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """An output for each of `kinds`: (tokens, guided, rescale, norm)."""

    kinds: tuple[tuple[int, bool, float, GuidanceNormCode], ...]
    channels: int = 64
    dtype: torch.dtype = F32
    latents_dtype: torch.dtype = F32
    name: str = ""

    def __str__(self) -> str:
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.latents_dtype))
        return f"{self.name}-{self.channels}-{dtypes}"


KINDS = tuple(
    (tokens, guided, rescale, norm)
    for tokens, (guided, rescale, norm) in zip(
        (17, 1, 40, 300, 9, 33, 64),
        (
            (False, 0.0, GuidanceNormCode.NONE),
            (True, 0.0, GuidanceNormCode.NONE),
            (True, 0.0, GuidanceNormCode.RENORM),
            (True, 0.7, GuidanceNormCode.NONE),
            (True, 0.0, GuidanceNormCode.RENORM_CLIPPED),
            (True, 0.3, GuidanceNormCode.RENORM_CLIPPED),
            (True, 1.0, GuidanceNormCode.NONE),
        ),
        strict=True,
    )
)

CASES = (
    *(
        Case(KINDS, channels, dtype, latents_dtype, "every kind")
        for channels, dtype, latents_dtype in itertools.product((64, 16, 264, 7), (F32, BF16), (F32, BF16))
    ),
    Case((KINDS[0],), name="not guided"),
    Case(((0, True, 0.0, GuidanceNormCode.RENORM), KINDS[3]), name="no tokens"),
    Case(((5, True, 0.0, GuidanceNormCode.RENORM),) * 70, 16, BF16, BF16, name="more outputs than a launch takes"),
    Case(
        ((5, True, 0.5, GuidanceNormCode.RENORM), (6, False, 0.0, GuidanceNormCode.NONE)) * 35,
        16,
        name="more launches, rescaled",
    ),
    Case((), name="no output"),
)


def inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, list[OutputStep]]:
    """Rows as a batch has them: the branches of an output one after the other, a token of context behind each."""
    generator = torch.Generator().manual_seed(seed)
    moves, at = [], 0
    for tokens, guided, rescale, norm in case.kinds:
        scale, width = torch.rand(2, generator=generator).tolist()
        uncond = at + tokens + 1 if guided else None
        moves.append(
            OutputStep(
                cond=at,
                uncond=uncond,
                latents=at,
                tokens=tokens,
                width=-width,
                scale=1 + 6 * scale,
                rescale=rescale,
                norm=norm,
            )
        )
        at += (tokens + 1) * (2 if guided else 1)
    prediction, latents = torch.randn(2, at, case.channels, generator=generator)
    return prediction.to(device, case.dtype), latents.to(device, case.latents_dtype), moves


def expected(prediction: Tensor, latents: Tensor, move: OutputStep) -> tuple[Tensor, Tensor]:
    """The guided prediction and the next latents of one output, in float64."""
    x, cond = (
        tensor[at : at + move.tokens].double() for tensor, at in ((latents, move.latents), (prediction, move.cond))
    )
    if move.uncond is not None:
        uncond = prediction[move.uncond : move.uncond + move.tokens].double()
        cond = guide(cond, uncond, move.scale, move.rescale, move.norm)
    return cond, x + move.width * cond


def check_case(case: Case, device: str, seed: int) -> None:
    """The op against its formulas in float64: within the rounding of its output dtype, element by element."""
    prediction, latents, moves = inputs(case, device, seed)
    moved = guide_step(prediction, latents, moves)
    assert moved.nonfinite.tolist() == [0] * len(moves), f"{case} on {device}, seed {seed}: {moved.nonfinite.tolist()}"
    assert moved.nonfinite.dtype == torch.int32
    for number, (move, guided, following) in enumerate(zip(moves, moved.guided, moved.latents, strict=True)):
        for what, got, want in zip(
            ("guided", "next"), (guided, following), expected(prediction, latents, move), strict=True
        ):
            where = f"{case} on {device}, seed {seed}: {what} of output {number}"
            assert got.dtype == case.dtype, f"{where}: {got.dtype}"
            assert got.shape == want.shape, f"{where}: {got.shape}"
            relative = 2.0**-8 if case.dtype is BF16 else 1e-5
            excess = (got.double() - want).abs() - relative * want.abs() - 2e-5
            worst = excess.amax().item() if excess.numel() else 0.0
            assert worst <= 0, f"{where}: off by {worst:.3g} more than rounding allows"


def check_outputs_are_independent(device: str, seed: int) -> None:
    """An output's results are the same bits alone, in company, and in another order."""
    for dtype, channels in ((F32, 64), (BF16, 64), (BF16, 9)):
        prediction, latents, moves = inputs(Case(KINDS, channels, dtype, dtype), device, seed)
        together = guide_step(prediction, latents, moves)
        backwards = guide_step(prediction, latents, moves[::-1])
        for number, move in enumerate(moves):
            alone = guide_step(prediction, latents, [move])
            for other, place in ((alone, 0), (backwards, len(moves) - 1 - number)):
                where = f"{dtype}, output {number} on {device}, seed {seed}"
                assert torch.equal(other.latents[place], together.latents[number]), where
                assert torch.equal(other.guided[place], together.guided[number]), where


def check_odd_outputs_are_named(device: str, seed: int) -> None:
    """Those with a value that is not finite, or too large for the dtype, and no others."""
    prediction, latents, moves = inputs(Case(KINDS[:5], 64, BF16, F32), device, seed)
    prediction[moves[1].cond, 3] = torch.nan
    latents[moves[3].latents + 299, 63] = torch.inf
    latents[moves[4].latents + 8, 0] = 3.4e38  # float32 holds it, bfloat16 rounds it to infinity
    assert guide_step(prediction, latents, moves).nonfinite.tolist() == [0, 1, 0, 1, 1], f"on {device}, seed {seed}"


def check_a_token_of_length_zero_stays_finite(device: str, seed: int) -> None:
    prediction = torch.cat([torch.full((2, 8), 8.0), torch.full((2, 8), 16.0)]).to(device)
    latents = torch.ones(2, 8, device=device)
    for norm in GuidanceNormCode:
        move = OutputStep(cond=0, uncond=2, latents=0, tokens=2, width=-1.0, scale=2.0, norm=norm)
        moved: StepResult = guide_step(prediction, latents, [move])
        assert torch.equal(moved.guided[0], torch.zeros_like(latents)), f"{norm} on {device}"
        assert torch.equal(moved.latents[0], latents), f"{norm} on {device}"


def check_views(device: str, seed: int) -> None:
    """Inputs that are no whole tensors."""
    prediction, latents, moves = inputs(Case(KINDS, 16), device, seed)
    want = guide_step(prediction, latents, moves)

    def odd(x: Tensor) -> Tensor:
        table = x.new_zeros(x.shape[0], x.shape[1] + 3)
        table[:, 1:17] = x
        return table[:, 1:17]

    for change in (odd, lambda x: x.t().contiguous().t()):
        got = guide_step(change(prediction), change(latents), moves)
        pairs: Sequence[tuple[Tensor, Tensor]] = list(zip(got.latents, want.latents, strict=True))
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs), f"on {device}, seed {seed}"


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_outputs_are_independent,
    check_odd_outputs_are_named,
    check_a_token_of_length_zero_stays_finite,
    check_views,
)
CUDA_CHECKS = CHECKS
