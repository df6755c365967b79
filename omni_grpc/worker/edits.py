"""The only list that knows two features: what is done to a denoiser, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from omni_grpc.checkpoint.hub import fetch_file
from omni_grpc.config import EngineConfig, QuantizationConfig, WorkerConfig
from omni_grpc.config.roles import Roles
from omni_grpc.features import (
    Context,
    Effects,
    attention,
    batch_invariant,
    cuda_graphs,
    gguf,
    layerwise_offload,
    lora,
    quant,
    step_cache,
)
from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.loading.gguf import GgufFile
from omni_grpc.loading.loader import Edit, Loader
from omni_grpc.resolve.settings import HUB_FILE, gguf_files
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.worker.base import RunnerContext
from omni_grpc.worker.lanes import Lanes

Apply = Callable[[nn.Module, Any, Context], None]

PACKED = "gguf"
"""The quantisation that comes with a file of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """One feature: its section of the configuration (None: it is off), and its function."""

    section: Callable[[EngineConfig], Any]
    apply: Apply


def _eight_bits(config: EngineConfig) -> QuantizationConfig | None:
    chosen = config.quantization or QuantizationConfig()
    return None if chosen.quantization == PACKED else chosen


def _packed(config: EngineConfig) -> QuantizationConfig | None:
    chosen = config.quantization
    return chosen if chosen is not None and chosen.quantization == PACKED else None


def _attention(config: EngineConfig) -> Roles | None:
    """Rows that are alike in any batch need a form of the platform's own choice."""
    return config.model.attention or (Roles() if config.model.batch_invariant else None)


def _graphs(config: EngineConfig) -> WorkerConfig | None:
    """Not where weights move while the blocks run."""
    moving = config.offload is not None and config.offload.enable_layerwise_offload
    return None if moving or config.worker.cuda_graph_tokens == 0 else config.worker


BEFORE: tuple[Feature, ...] = (
    # on even where nothing is set: a checkpoint may be quantised as it is
    Feature(_eight_bits, quant.apply),
    Feature(_packed, gguf.apply),
    Feature(lambda config: config.model if config.model.batch_invariant else None, batch_invariant.apply),
    # here, so that weights go to the host as they come; and first around the stack, so innermost
    Feature(lambda config: config.offload, layerwise_offload.apply),
)
"""Edits of modules without weights: tensor parallel, then quantisation and what is left of products, then offload."""

AFTER: tuple[Feature, ...] = (
    Feature(lambda config: config.loras, lora.apply),
    Feature(_attention, attention.apply),
    # around nothing but the blocks: what decides whether they run is outside
    Feature(_graphs, cuda_graphs.apply),
    Feature(lambda config: config.cache, step_cache.apply),
)
"""Edits of modules with weights: LoRA, attention, graphs, cache, pipeline and sequence parallel."""


def loader(setting: RunnerContext, effects: Effects, lanes: Lanes) -> Loader:
    """Loads the parts of a pipeline, with every feature that the configuration turns on; they tell `effects` of it.
    `lanes` are the threads that will work with it.
    """
    model = setting.config.model
    return Loader(
        threads=1 if model.disable_multithread_weight_load else model.num_weight_load_threads,
        checkpoint=setting.checkpoint,
        device=setting.device,
        dtype=setting.dtype,
        files=_files(setting),
        before=_edits(BEFORE, setting, effects, lanes),
        after=_edits(AFTER, setting, effects, lanes),
    )


def _files(setting: RunnerContext) -> dict[str, GgufFile]:
    """The files that have the weights of denoisers, each open. Raises CheckpointError, see GgufFile.open."""
    chosen, spec = _packed(setting.config), setting.checkpoint.spec
    if chosen is None or spec.single_file is None:
        return {}
    opened = {}
    for component, name in gguf_files(chosen, setting.checkpoint).items():
        path = Path(name)
        if not path.is_file() and (of_hub := HUB_FILE.fullmatch(name)):
            setting.tell(Loading(phase=LoadPhase.DOWNLOADING, component=component, file=of_hub[2]))
            path = fetch_file(*of_hub.groups())
            setting.tell(Loading())
        opened[component] = GgufFile.open(path, spec.single_file, spec.name)
    return opened


def _edits(features: Sequence[Feature], setting: RunnerContext, effects: Effects, lanes: Lanes) -> list[Edit]:
    return [_edit(each, setting, effects, lanes) for each in features if each.section(setting.config) is not None]


def _edit(feature: Feature, setting: RunnerContext, effects: Effects, lanes: Lanes) -> Edit:
    def edit(module: nn.Module, component: str, places: WeightTargets) -> None:
        context = Context(
            component=component,
            spec=setting.checkpoint.spec,
            device=setting.device,
            dtype=setting.dtype,
            places=places,
            batch_invariant=setting.config.model.batch_invariant,
            effects=effects,
            alone=lanes.alone,
        )
        feature.apply(module, feature.section(setting.config), context)

    return edit
