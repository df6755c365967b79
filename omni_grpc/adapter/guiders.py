"""Pipelines that are guided by a component of theirs, a guider, and have no parameter for the scale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.guiders.guider_utils import BaseGuidance

from omni_grpc.adapter.quirks import GUIDED_BY_QUOTES


def guiders(pipeline: DiffusionPipeline) -> list[Any]:
    """The guiders of a pipeline that are on."""
    return [part for part in pipeline.components.values() if isinstance(part, BaseGuidance) and part._enabled]


def own_scale(pipeline: DiffusionPipeline) -> float | None:
    """The scale that its guider applies unless told otherwise; None where there is none, or none that has one scale."""
    special, *_ = GUIDED_BY_QUOTES.get(type(pipeline).__name__, ("",))
    usual = (part for name, part in pipeline.components.items() if isinstance(part, BaseGuidance) and name != special)
    return _scale(next(usual, None))


def prompt_scale(pipeline: DiffusionPipeline) -> dict[str, Any] | None:
    """The fields of `spec.PromptScale` where the pipeline has a guider of its own for some prompts; else None."""
    special, pattern, embeds = GUIDED_BY_QUOTES.get(type(pipeline).__name__, ("", "", ""))
    guider = pipeline.components.get(special)
    if guider is None:
        return None
    return {"pattern": pattern, "embeds": embeds, "found": _scale(guider), "otherwise": own_scale(pipeline)}


def has_scale(pipeline: DiffusionPipeline) -> bool:
    """Whether some prompt is guided by a component whose scale can be set."""
    special = prompt_scale(pipeline)
    return own_scale(pipeline) is not None or (special is not None and special["found"] is not None)


def _scale(guider: Any) -> float | None:
    scale = getattr(guider, "guidance_scale", None) if guider is not None and guider._enabled else None
    return float(scale) if isinstance(scale, int | float) else None


@contextlib.contextmanager
def guided(pipeline: DiffusionPipeline, scale: float | None) -> Iterator[None]:
    """Within this, the guiders of the pipeline apply `scale`, whichever of them the prompt calls for; their own where
    it is None. After it they are as before: they keep the step that they are at, which another request must not see.
    """
    found = guiders(pipeline)
    kept = [dict(vars(guider)) for guider in found]
    for guider in found:
        if scale is not None and _scale(guider) not in (None, scale):
            guider.guidance_scale = scale
    try:
        yield
    finally:
        for guider, state in zip(found, kept, strict=True):
            vars(guider).clear()
            vars(guider).update(state)
