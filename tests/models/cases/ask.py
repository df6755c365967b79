"""What is asked of the models under test."""

from __future__ import annotations

from typing import Any

from omni_grpc.types.request import Draft, GuidanceDraft
from tests.models.model import NAME

SHORT = "a red cat"
LONG = "mountains and a lake at sunrise, watercolor painting, soft pastel colors, studio light, high detail, " * 4
OFF = GuidanceDraft(true_cfg_scale=1.0)
"""For a model that is always guided, unless it is told not to be."""
NEGATIVE = "low quality, blurry"


def ask(
    width: int = 64,
    height: int = 64,
    *,
    prompt: str = SHORT,
    steps: int = 2,
    seeds: tuple[int, ...] = (7,),
    **more: Any,
) -> Draft:
    return Draft(model=NAME, prompt=prompt, width=width, height=height, steps=steps, seeds=seeds, **more)
