"""The profiler of a pipeline's components. It wraps what is loaded, native or not, and edits no denoiser."""

from __future__ import annotations

from omni_grpc.config import EngineConfig, ProfilerConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules
from omni_grpc.types.spec import Checkpoint


def _section(config: EngineConfig) -> ProfilerConfig | None:
    return config.profiler


def _faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    if config.profiler is None or config.profiler.enable_diffusion_pipeline_profiler:
        return {}
    return {"diffusion_pipeline_profiler_targets": "needs --enable-diffusion-pipeline-profiler"}


RULES = FeatureRules(name="profiler", section=_section, faults=_faults)
