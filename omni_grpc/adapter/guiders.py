"""Pipelines that are guided by a component of theirs, a guider, and have no parameter for the scale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.guiders.guider_utils import BaseGuidance


def guiders(pipeline: DiffusionPipeline) -> list[Any]:
    """The guiders of a pipeline that are on; the first is the one for every prompt."""
    found = {name: part for name, part in pipeline.components.items() if isinstance(part, BaseGuidance)}
    return [found[name] for name in sorted(found, key=lambda name: name != "guider") if found[name]._enabled]


def own_scale(pipeline: DiffusionPipeline) -> float | None:
    """The scale that its guider applies unless told otherwise; None where there is none, or none that has one scale."""
    scale = next((getattr(guider, "guidance_scale", None) for guider in guiders(pipeline)), None)
    return float(scale) if isinstance(scale, int | float) else None


@contextlib.contextmanager
def guided(pipeline: DiffusionPipeline, scale: float | None) -> Iterator[None]:
    """Within this, the guiders of the pipeline apply `scale`; their own where it is None or equal to it. After it they
    are as before: they keep the step that they are at, which another request must not see.
    """
    found = guiders(pipeline)
    kept = [dict(vars(guider)) for guider in found]
    if scale is not None and scale != own_scale(pipeline):
        for guider in found:
            guider.guidance_scale = scale
    try:
        yield
    finally:
        for guider, state in zip(found, kept, strict=True):
            vars(guider).clear()
            vars(guider).update(state)
