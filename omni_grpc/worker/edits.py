"""The only list that knows two features: what is done to a denoiser, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from omni_grpc.config import EngineConfig
from omni_grpc.features import Context
from omni_grpc.loading.loader import Edit, Loader
from omni_grpc.worker.base import Setting

Apply = Callable[[nn.Module, Any, Context], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """One feature: its section of the configuration (None: it is off), and its function."""

    section: Callable[[EngineConfig], Any]
    apply: Apply


BEFORE: tuple[Feature, ...] = ()
"""Edits of modules without weights: tensor parallel, then quantisation."""

AFTER: tuple[Feature, ...] = ()
"""Edits of modules with weights: LoRA, attention, compile, offload, cache, pipeline and sequence parallel."""


def loader(setting: Setting) -> Loader:
    """Loads the parts of a pipeline, with every feature that the configuration turns on."""
    return Loader(
        checkpoint=setting.checkpoint,
        device=setting.device,
        dtype=setting.dtype,
        before=[_edit(feature, setting) for feature in BEFORE if feature.section(setting.config) is not None],
        after=[_edit(feature, setting) for feature in AFTER if feature.section(setting.config) is not None],
    )


def _edit(feature: Feature, setting: Setting) -> Edit:
    def edit(module: nn.Module, component: str) -> None:
        context = Context(component=component, spec=setting.checkpoint.spec, device=setting.device, dtype=setting.dtype)
        feature.apply(module, feature.section(setting.config), context)

    return edit
