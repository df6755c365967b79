"""The order in which features edit a denoiser. With feature_rules/table.py, all that names more than one feature."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from omni_grpc.feature_rules import (
    attention,
    batch_invariant,
    cuda_graphs,
    gguf,
    layerwise_offload,
    lora,
    quant,
    ranks,
    step_cache,
)
from omni_grpc.feature_rules.base import FeatureRules
from omni_grpc.feature_rules.table import FEATURES, is_on
from omni_grpc.features import Context, Effects
from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.loading.gguf import GgufFile
from omni_grpc.loading.loader import Edit, Loader
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.worker.base import RunnerContext
from omni_grpc.worker.lanes import Lanes
from omni_grpc.worker.load_progress import Progress

Apply = Callable[[nn.Module, Any, Context], None]

BEFORE: tuple[FeatureRules, ...] = (
    # first, so that what replaces a layer gets this rank's part of it
    ranks.TENSOR,
    ranks.EXPERT,
    # around what ranks have of a layer, and first around the stack, so innermost
    ranks.PIPELINE,
    quant.RULES,
    gguf.RULES,
    batch_invariant.RULES,
    # of whatever computes a layer, what its weights became
    ranks.HSDP,
    # here, so that weights go to the host as they are loaded; and first around the stack, so innermost
    layerwise_offload.RULES,
)
"""Edits of modules without weights: tensor parallel, then quantization and what is left in full precision, then
offload.
"""

AFTER: tuple[FeatureRules, ...] = (
    lora.RULES,
    attention.RULES,
    ranks.ULYSSES,
    # around nothing but the blocks: what decides whether they run is outside
    cuda_graphs.RULES,
    step_cache.RULES,
    # last: everything else sees this rank's tokens
    ranks.SEQUENCE,
)
"""Edits of modules with weights: LoRA, attention, graphs, cache, then sequence parallel."""

AROUND: tuple[FeatureRules, ...] = (
    # inside of what decides which rank runs an encoder
    lora.ENCODERS,
    ranks.CFG,
    ranks.VAE,
    ranks.ENCODERS,
)
"""Edits of a whole pipeline, once all of its parts are there."""


def surround(pipeline: Pipeline, setting: RunnerContext, effects: Effects, lanes: Lanes) -> None:
    """Puts the features of a whole pipeline around it."""
    for feature in AROUND:
        if _is_on(feature, setting):
            apply: Callable[[Pipeline, Any, Context], None] = pkgutil.resolve_name(feature.apply)
            context = Context(
                component="",
                spec=setting.checkpoint.spec,
                device=setting.device,
                dtype=setting.dtype,
                ranks=setting.ranks,
                denoisers=setting.checkpoint.denoisers,
                batch_invariant=setting.config.model.batch_invariant,
                effects=effects,
                work=lanes.work,
                copied=None if setting.memory is None else setting.memory.copied,
            )
            apply(pipeline, feature.section(setting.config), context)


def loader(setting: RunnerContext, effects: Effects, lanes: Lanes) -> Loader:
    """Loads the parts of a pipeline, with every feature that the configuration turns on; they report to `effects`.
    `lanes` are the threads that will work with it.
    """
    model = setting.config.model
    return Loader(
        threads=1 if model.disable_multithread_weight_load else model.num_weight_load_threads,
        checkpoint=setting.checkpoint,
        device=setting.device,
        dtype=setting.dtype,
        files=_weight_files(setting),
        take=None if setting.staging is None else setting.staging.take,
        begin=Progress(setting).begin,
        before=_edits(BEFORE, setting, effects, lanes),
        after=_edits(AFTER, setting, effects, lanes),
    )


def _weight_files(setting: RunnerContext) -> dict[str, GgufFile]:
    """Component -> the open file that has its weights in place of the checkpoint. Raises CheckpointError for a file
    that cannot be read.
    """
    files: dict[str, GgufFile] = {}
    for feature in FEATURES:
        if feature.open_weights and is_on(feature, setting.config):
            open_weights = pkgutil.resolve_name(feature.open_weights)
            files |= open_weights(feature.section(setting.config), setting.checkpoint, setting.tell)
    return files


def _edits(features: Sequence[FeatureRules], setting: RunnerContext, effects: Effects, lanes: Lanes) -> list[Edit]:
    return [_edit(feature, setting, effects, lanes) for feature in features if _is_on(feature, setting)]


def _is_on(feature: FeatureRules, setting: RunnerContext) -> bool:
    """Ranks turn on those features that need them."""
    if feature.axis is None:
        return is_on(feature, setting.config)
    return setting.ranks is not None and feature.axis in setting.ranks.groups


def _edit(feature: FeatureRules, setting: RunnerContext, effects: Effects, lanes: Lanes) -> Edit:
    apply: Apply = pkgutil.resolve_name(feature.apply)

    def edit(module: nn.Module, component: str, places: WeightTargets) -> None:
        context = Context(
            component=component,
            spec=setting.checkpoint.spec,
            device=setting.device,
            dtype=setting.dtype,
            ranks=setting.ranks,
            denoisers=setting.checkpoint.denoisers,
            places=places,
            batch_invariant=setting.config.model.batch_invariant,
            effects=effects,
            exclusive=lanes.exclusive,
            work=lanes.work,
            copied=None if setting.memory is None else setting.memory.copied,
        )
        apply(module, feature.section(setting.config), context)

    return edit
