"""Guidance: one prediction out of the predictions of a request's branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from omni_grpc.pipeline.state import COND, UNCOND
from omni_grpc.request import Guidance, GuidanceNorm


def combine(predictions: Mapping[str, Tensor], guidance: Guidance) -> Tensor:
    """Classifier-free guidance (https://arxiv.org/abs/2207.12598): uncond + s * (cond - uncond), rescaled, then normed.

    predictions: branch -> [T, C]. With the conditional branch alone, that is the result.
    """
    cond = predictions[COND]
    if UNCOND not in predictions:
        return cond
    uncond = predictions[UNCOND]
    guided = uncond + guidance.true_cfg_scale * (cond - uncond)
    if guidance.rescale:
        guided = _rescale(guided, cond, guidance.rescale)
    return _NORMS[guidance.norm](guided, cond)


def _rescale(guided: Tensor, cond: Tensor, share: float) -> Tensor:
    """https://arxiv.org/abs/2305.08891, eq. 15 and 16: the standard deviations are over one whole output."""
    factor = cond.std() / guided.std()
    return torch.lerp(guided, guided * factor, share)


def _renorm(guided: Tensor, cond: Tensor) -> Tensor:
    return guided * _ratio(guided, cond)


def _renorm_clipped(guided: Tensor, cond: Tensor) -> Tensor:
    return guided * _ratio(guided, cond).clamp(max=1.0)


def _ratio(guided: Tensor, cond: Tensor) -> Tensor:
    """Per token, the length of cond over the length of guided: [T, 1]. A guided token of length 0 stays 0, not NaN."""
    wanted, length = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (cond, guided))
    ratio: Tensor = wanted / length.clamp_min(1e-12)
    return ratio


_NORMS: Mapping[GuidanceNorm, Callable[[Tensor, Tensor], Tensor]] = {
    GuidanceNorm.NONE: lambda guided, cond: guided,
    GuidanceNorm.RENORM: _renorm,
    GuidanceNorm.RENORM_CLIPPED: _renorm_clipped,
}
