"""The step family: from the predictions of a batch to the latents of every output one step on.

Shapes: T tokens of all predictions, L tokens of all latents, C channels, S outputs, N tokens of an output.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, op

FEWEST_LENGTH = 1e-12
PLACES, FACTORS = 5, 3
"""Numbers of each output in the op's flat lists: cond, uncond, latents, tokens, norm; scale, rescale, width."""


class GuidanceNormCode(enum.IntEnum):
    """request.GuidanceNorm as the kernels number it: what happens to the length of each guided token."""

    NONE = 0
    RENORM = 1
    RENORM_CLIPPED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputStep:
    """One output's step. cond, uncond: the first token of its conditional and unconditional prediction (uncond None:
    without classifier-free guidance). latents: the first token of its latents. width: the next sigma minus this one.
    """

    cond: int
    uncond: int | None
    latents: int
    tokens: int
    width: float
    scale: float = 1.0
    rescale: float = 0.0
    norm: GuidanceNormCode = GuidanceNormCode.NONE


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The outputs, in their order: the guided prediction [N, C] and the next latents [N, C] of each; `nonfinite` int32
    [S] is 0 where all of an output's next latents are finite.
    """

    guided: tuple[Tensor, ...]
    latents: tuple[Tensor, ...]
    nonfinite: Tensor


def guide_step(prediction: Tensor, latents: Tensor, moves: Sequence[OutputStep]) -> StepResult:
    """Classifier-free guidance (CFG), see `guide`, and an Euler step: latents + width * guided.

    prediction: [T, C]. latents: [L, C], of any dtype. Results are in the prediction's dtype, computed in float32
    (float64 for float64): views of one tensor, or of the prediction where an output is not guided. A result does not
    depend on the other outputs. Raises RuntimeError where shapes or devices disagree or a place is out of range.
    Kernels serve float32 and bfloat16, the reference everything else.
    """
    places = [
        place
        for move in moves
        for place in (move.cond, -1 if move.uncond is None else move.uncond, move.latents, move.tokens, int(move.norm))
    ]
    factors = [factor for move in moves for factor in (move.scale, move.rescale, move.width)]
    guided, following, nonfinite = guide_step_op(prediction, latents, places, factors)
    parts = iter(guided.split([move.tokens for move in moves if move.uncond is not None]))
    return StepResult(
        tuple(
            prediction[move.cond : move.cond + move.tokens] if move.uncond is None else next(parts) for move in moves
        ),
        following.split([move.tokens for move in moves]),
        nonfinite,
    )


def guide(cond: Tensor, uncond: Tensor, scale: float, rescale: float, norm: GuidanceNormCode) -> Tensor:
    """uncond + scale * (cond - uncond) (https://arxiv.org/abs/2207.12598), rescaled, then normed.

    cond, uncond: [N, C], all tokens of one output. rescale: https://arxiv.org/abs/2305.08891, eq. 15 and 16; the
    standard deviations are over the whole output. norm: per token, to the length of cond; a guided token of length 0
    stays 0, not NaN.
    """
    guided = uncond + scale * (cond - uncond)
    if rescale:
        guided = torch.lerp(guided, guided * (cond.std() / guided.std()), rescale)
    if norm is GuidanceNormCode.NONE:
        return guided
    wanted, length = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (cond, guided))
    ratio: Tensor = wanted / length.clamp_min(FEWEST_LENGTH)
    return guided * (ratio.clamp(max=1.0) if norm is GuidanceNormCode.RENORM_CLIPPED else ratio)


def _fake(
    prediction: Tensor, latents: Tensor, places: Sequence[int], factors: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    _check(prediction, latents, places, factors)
    states = [places[at : at + PLACES] for at in range(0, len(places), PLACES)]
    channels = prediction.shape[1]
    return (
        prediction.new_empty(sum(tokens for _, uncond, _, tokens, _ in states if uncond >= 0), channels),
        prediction.new_empty(sum(tokens for _, _, _, tokens, _ in states), channels),
        prediction.new_empty(len(states), dtype=torch.int32),
    )


def _have_kernel_dtypes(prediction: Tensor, latents: Tensor) -> bool:
    return prediction.dtype in KERNEL_DTYPES and latents.dtype in KERNEL_DTYPES


@op(kernel_if=_have_kernel_dtypes, of=("prediction", "latents"), fake=_fake)
def guide_step_op(
    prediction: Tensor, latents: Tensor, places: Sequence[int], factors: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """`guide_step` on flat lists: the guided predictions [N, C] of all guided outputs end to end, the next latents
    [N, C] of all outputs, and `nonfinite` int32 [S].
    """
    _check(prediction, latents, places, factors)
    math = torch.promote_types(prediction.dtype, torch.float32)
    guided_parts, parts = [], []
    for state in range(len(factors) // FACTORS):
        cond_at, uncond_at, latents_at, tokens, norm = places[PLACES * state : PLACES * (state + 1)]
        scale, rescale, width = factors[FACTORS * state : FACTORS * (state + 1)]
        guided = prediction[cond_at : cond_at + tokens].to(math)
        if uncond_at >= 0:
            guided = guide(
                guided, prediction[uncond_at : uncond_at + tokens].to(math), scale, rescale, GuidanceNormCode(norm)
            )
            guided_parts.append(guided.to(prediction.dtype))
        parts.append((latents[latents_at : latents_at + tokens].to(math) + width * guided).to(prediction.dtype))
    nonfinite = [(~part.isfinite().all()).int() for part in parts]
    empty = prediction.new_empty(0, prediction.shape[1])
    return (
        torch.cat([empty, *guided_parts]),
        torch.cat([empty, *parts]),
        torch.stack(nonfinite) if nonfinite else prediction.new_empty(0, dtype=torch.int32),
    )


def _check(prediction: Tensor, latents: Tensor, places: Sequence[int], factors: Sequence[float]) -> None:
    torch._check(
        prediction.dim() == 2 and latents.dim() == 2 and prediction.shape[1] == latents.shape[1],
        lambda: (
            f"guide_step: prediction and latents must be [T, C] and [L, C], got {tuple(prediction.shape)} and "
            f"{tuple(latents.shape)}"
        ),
    )
    torch._check(
        prediction.device == latents.device, lambda: "guide_step: prediction and latents must be on one device"
    )
    torch._check(
        len(places) % PLACES == 0 and len(places) // PLACES * FACTORS == len(factors),
        lambda: f"guide_step: {len(places)} places and {len(factors)} factors; an output has {PLACES} and {FACTORS}",
    )
    for at in range(0, len(places), PLACES):
        cond, uncond, first, tokens, norm = places[at : at + PLACES]
        torch._check(
            tokens >= 0
            and 0 <= cond <= prediction.shape[0] - tokens
            and -1 <= uncond <= prediction.shape[0] - tokens
            and 0 <= first <= latents.shape[0] - tokens
            and 0 <= norm < len(GuidanceNormCode),
            lambda at=at: f"guide_step: output {at // PLACES} lies outside of the prediction or the latents",
        )
