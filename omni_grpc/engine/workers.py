"""The workers of a server: one for each replica, each on a device of its own, or where a Ray cluster has room."""

from __future__ import annotations

import os
from collections.abc import Mapping

from omni_grpc.checkpoint.registry import on_hub
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import RAY
from omni_grpc.engine.executor import Executor, HubExecutor, ProcessExecutor
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.spec import Checkpoint

VISIBLE = "CUDA_VISIBLE_DEVICES"


def executors(config: EngineConfig, checkpoint: Checkpoint) -> list[Executor]:
    """One for each replica of `--data-parallel-size`. Raises ConfigError where CUDA_VISIBLE_DEVICES lists fewer devices
    than there are replicas, or where the extra for Ray is not installed.
    """
    if config.worker.distributed_executor_backend == RAY:
        # here, so that nobody else needs it
        from omni_grpc.engine.ray_executor import ray_executors

        return ray_executors(config, checkpoint)
    kind = HubExecutor if on_hub(config.model) else ProcessExecutor
    replicas = config.worker.data_parallel_size
    return [kind(config, checkpoint, environment=_environment(number, replicas, config)) for number in range(replicas)]


def _environment(number: int, replicas: int, config: EngineConfig) -> Mapping[str, str]:
    """What a worker sees of the machine. A single one sees all of it; on a CPU they share it."""
    if replicas == 1 or config.model.device == "cpu":
        return {}
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return {VISIBLE: str(number)}
    devices = [name.strip() for name in listed.split(",") if name.strip()]
    if devices and number >= len(devices):
        rule = f"is {replicas}, but {VISIBLE} lists {len(devices)} devices; nearest valid value: {len(devices)}"
        raise ConfigError(f"data_parallel_size {rule}", violations=(Violation("data_parallel_size", rule),))
    return {VISIBLE: devices[number]} if devices else {}
