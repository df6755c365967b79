"""Other pipeline classes over the components of one that is loaded, so that its weights do other tasks too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.pipelines import auto_pipeline

from omni_grpc.adapter.abilities import ability
from omni_grpc.types.request import Task

FROM = (auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, auto_pipeline.AUTO_TEXT2VIDEO_PIPELINES_MAPPING)
"""Only weights that make something of text alone do the rest: those trained to look at a picture always need one."""

TO = (
    auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
    auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    auto_pipeline.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
    auto_pipeline.AUTO_VIDEO2VIDEO_PIPELINES_MAPPING,
)


def siblings(pipeline: DiffusionPipeline) -> tuple[list[DiffusionPipeline], dict[Task, str]]:
    """Pipelines that share every component with this one, and why there is none for a task that diffusers has one for.

    The classes are those that AutoPipeline would choose for the same checkpoint.
    """
    kind = type(pipeline)
    made: list[DiffusionPipeline] = []
    refused: dict[Task, str] = {}
    for name in [name for mapping in FROM for name, one in mapping.items() if one is kind]:
        for other in dict.fromkeys(mapping[name] for mapping in TO if name in mapping):
            able = ability(other)
            if other is kind or able.reason:
                continue
            if reason := _unfit(pipeline, other):
                refused |= dict.fromkeys(able.tasks, f"{other.__name__} {reason}")
            else:
                made.append(_over(pipeline, other))
    return made, refused


def _unfit(pipeline: DiffusionPipeline, other: type[DiffusionPipeline]) -> str:
    """Why `other` cannot do what the checkpoint was made for with these components, or ""."""
    takes, own = _parameters(other), _parameters(type(pipeline))
    parts = pipeline.components
    if unused := [name for name, part in parts.items() if part is not None and name not in takes]:
        return f"has no use for {', '.join(unused)}"
    settings = {name: pipeline.config[name] for name in own if name not in parts and name in pipeline.config}
    if lost := [name for name, value in settings.items() if name not in takes and value != own[name].default]:
        return f"does not know {', '.join(lost)}"
    have = {*parts, *settings}
    lacking = [name for name, p in takes.items() if p.default is inspect.Parameter.empty and name not in have]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _over(pipeline: DiffusionPipeline, other: type[DiffusionPipeline]) -> DiffusionPipeline:
    # the library's own from_pipe would cast the weights to float32
    values: dict[str, Any] = {**pipeline.config, **pipeline.components}
    made = other(**{name: values[name] for name in _parameters(other) if name in values})
    made.set_progress_bar_config(disable=True)
    return made


def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(kind).parameters.items() if p.kind is not p.VAR_KEYWORD}
