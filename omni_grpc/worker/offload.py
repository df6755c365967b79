"""What of a model leaves the device, decided from settings before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging

import torch

from omni_grpc.checkpoint import sizes
from omni_grpc.config import EngineConfig
from omni_grpc.feature_rules.base import is_native
from omni_grpc.resolve.memory_hints import changed
from omni_grpc.resolve.residency import SETTING, ResidencyPlan, plan_adapter, plan_residency, sizes_of
from omni_grpc.resolve.settings import Placement, check_settings
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.load_progress import size_text
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.device_memory import DeviceMemory, memory_of
from omni_grpc.worker.phases import Staging

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Offloading:
    """How a model is loaded: the configuration with what a budget turned on, the components that are there only while
    they run, and both in words ("" where all is on the device and no budget says so).
    """

    config: EngineConfig
    staging: Staging | None = None
    described: str = ""


def offloading(
    config: EngineConfig,
    checkpoint: Checkpoint,
    placement: Placement,
    memory: DeviceMemory | None = None,
) -> Offloading:
    """Raises ConfigError for an offload on a CPU, and for a budget that the model does not fit. `memory` is that of the
    device, where it is not the placement's own.
    """
    device = torch.device(placement.device)
    memory = memory or memory_of(device)
    if memory is None:
        # the budget of a CPU's worker is for those who decide which models are awake
        if config.adapter.enable_cpu_offload and is_native(checkpoint):
            why = "needs an accelerator to offload from; leave it out on a CPU"
            message = f"--enable-cpu-offload: {why}"
            raise ConfigError(message, violations=(Violation("enable_cpu_offload", why),))
        return Offloading(config)
    made = _planned(config, checkpoint, placement, memory)
    if made.described:
        logger.info("%s: %s", checkpoint.name, made.described)
    return made


def _planned(config: EngineConfig, checkpoint: Checkpoint, placement: Placement, memory: DeviceMemory) -> Offloading:
    native, whole = is_native(checkpoint), config.adapter.enable_cpu_offload
    budget = config.fleet.budget_bytes
    if budget is None:
        if not (whole and native):
            return Offloading(config)
        return Offloading(config, Staging(memory), "text encoders and VAE between phases")
    memory.limit(budget)
    found = sizes_of(config, checkpoint, sizes.headers(checkpoint.path, without=checkpoint.replaced), placement.dtype)
    if not native:
        return _adapted(config, plan_adapter(found, budget), found.weights, budget)
    offload = config.offload
    by_layer = offload is not None and offload.enable_layerwise_offload
    plan = plan_residency(
        found,
        budget,
        staged=whole,
        resident_blocks=offload.layerwise_resident_blocks if offload is not None and by_layer else None,
    )
    if plan.resident_blocks is not None and not by_layer:
        config = changed(config, enable_layerwise_offload=True, layerwise_resident_blocks=plan.resident_blocks)
        _check(config, checkpoint)
    return Offloading(config, _staging(plan, memory), plan.describe(found, budget))


def _staging(plan: ResidencyPlan, memory: DeviceMemory) -> Staging | None:
    if not plan.between_phases:
        return None
    return Staging(memory, only=plan.between_phases, room=plan.room, by_block=plan.by_block, work=plan.work)


def _adapted(config: EngineConfig, by_component: bool, weights: int, budget: int) -> Offloading:
    """A diffusers pipeline, which has an offload of its own."""
    asked = config.adapter.enable_cpu_offload or config.offload is not None
    if by_component and not asked:
        config = changed(config, enable_cpu_offload=True)
    said = "offloaded as the settings say" if asked else "one component at a time" if by_component else "all resident"
    return Offloading(config, None, f"{said}: {size_text(weights)} of weights, budget {size_text(budget)}")


def _check(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a setting that does not go with the offload that the budget needs."""
    try:
        check_settings(config, checkpoint)
    except ConfigError as error:
        why = f"needs blocks to be offloaded, and {error}"
        raise ConfigError(f"--gpu-memory-budget {why}", violations=(Violation(SETTING, why),)) from error
