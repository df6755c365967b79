"""The only list that knows two features: what is done to a denoiser, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from omni_grpc.config import EngineConfig
from omni_grpc.features import Context, Effects, attention, int8, layerwise_offload, lora, step_cache
from omni_grpc.loading.checkpoint import Places
from omni_grpc.loading.loader import Edit, Loader
from omni_grpc.worker.base import Setting

Apply = Callable[[nn.Module, Any, Context], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """One feature: its section of the configuration (None: it is off), and its function."""

    section: Callable[[EngineConfig], Any]
    apply: Apply


BEFORE: tuple[Feature, ...] = (
    Feature(lambda config: config.quantization, int8.apply),
    # here, so that weights go to the host as they come; and first around the stack, so innermost
    Feature(lambda config: config.offload, layerwise_offload.apply),
)
"""Edits of modules without weights: tensor parallel, then quantisation, then offload."""

AFTER: tuple[Feature, ...] = (
    Feature(lambda config: config.loras, lora.apply),
    Feature(lambda config: config.model.attention, attention.apply),
    Feature(lambda config: config.cache, step_cache.apply),
)
"""Edits of modules with weights: LoRA, attention, compile, cache, pipeline and sequence parallel."""


def loader(setting: Setting, effects: Effects) -> Loader:
    """Loads the parts of a pipeline, with every feature that the configuration turns on; they tell `effects` of it."""
    model = setting.config.model
    return Loader(
        threads=1 if model.disable_multithread_weight_load else model.num_weight_load_threads,
        checkpoint=setting.checkpoint,
        device=setting.device,
        dtype=setting.dtype,
        before=[_edit(feature, setting, effects) for feature in BEFORE if feature.section(setting.config) is not None],
        after=[_edit(feature, setting, effects) for feature in AFTER if feature.section(setting.config) is not None],
    )


def _edit(feature: Feature, setting: Setting, effects: Effects) -> Edit:
    def edit(module: nn.Module, component: str, places: Places) -> None:
        context = Context(
            component=component,
            spec=setting.checkpoint.spec,
            device=setting.device,
            dtype=setting.dtype,
            places=places,
            effects=effects,
        )
        feature.apply(module, feature.section(setting.config), context)

    return edit
