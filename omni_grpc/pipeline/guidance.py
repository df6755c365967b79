"""Classifier-free guidance: combines the predictions of a request's branches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from omni_grpc.ops.step import GuidanceNormCode, guide
from omni_grpc.pipeline.state import COND, UNCOND
from omni_grpc.types.request import Guidance


def combine(predictions: Mapping[str, Tensor], guidance: Guidance) -> Tensor:
    """Classifier-free guidance, then guidance rescale, then renormalization: see ops.step.guide.

    predictions: branch -> [T, C]. If there is only the conditional branch, its prediction is the result.
    """
    cond = predictions[COND]
    if UNCOND not in predictions:
        return cond
    return guide(
        cond, predictions[UNCOND], guidance.true_cfg_scale, guidance.rescale, GuidanceNormCode[guidance.norm.name]
    )
