"""CUDA graphs: on unless a setting turns them off, or weights move."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, WorkerConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, is_native, no_effect_through_diffusers
from omni_grpc.types.spec import Checkpoint


def _section(config: EngineConfig) -> WorkerConfig | None:
    return None if config.worker.cuda_graph_tokens == 0 else config.worker


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.worker.cuda_graph_tokens is None or is_native(checkpoint):
        return {}
    return {"cuda_graph_tokens": no_effect_through_diffusers(checkpoint)}


RULES = FeatureRules(
    name="cuda_graphs",
    section=_section,
    apply="omni_grpc.features.cuda_graphs:apply",
    faults=_faults,
    setting="cuda_graph_tokens",
    excludes={
        "layerwise_offload": "does not work with --enable-layerwise-offload, which moves weights; leave one out",
    },
)
