"""Guidance: one prediction out of the predictions of a request's branches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from omni_grpc.ops.step import Norm, guide
from omni_grpc.pipeline.state import COND, UNCOND
from omni_grpc.types.request import Guidance


def combine(predictions: Mapping[str, Tensor], guidance: Guidance) -> Tensor:
    """Classifier-free guidance, rescaled, then normed: see ops.step.guide.

    predictions: branch -> [T, C]. With the conditional branch alone, that is the result.
    """
    cond = predictions[COND]
    if UNCOND not in predictions:
        return cond
    return guide(cond, predictions[UNCOND], guidance.true_cfg_scale, guidance.rescale, Norm[guidance.norm.name])
