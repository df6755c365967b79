"""The workers of a server: one for each replica, each on a device of its own, or where a Ray cluster has room."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

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
    replicas, devices = config.worker.data_parallel_size, config.worker.devices
    if devices:
        _check_devices(devices, replicas)
    return [kind(config, checkpoint, environment=_environment(number, config)) for number in range(replicas)]


def _check_devices(devices: Sequence[str], replicas: int) -> None:
    if len(devices) != replicas or not all(device.isdecimal() for device in devices):
        rule = f"is {','.join(devices)}: expected the numbers of {replicas} GPUs, one for each replica"
        raise ConfigError(f"devices {rule}", violations=(Violation("devices", rule),))


def _environment(number: int, config: EngineConfig) -> Mapping[str, str]:
    """What a worker sees of the machine. A single one sees all of it, unless it is given a device; on a CPU they share
    it.
    """
    worker = config.worker
    if config.model.device == "cpu" or (worker.data_parallel_size == 1 and not worker.devices):
        return {}
    device = int(worker.devices[number]) if worker.devices else number
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return {VISIBLE: str(device)}
    visible = [name.strip() for name in listed.split(",") if name.strip()]
    if visible and device >= len(visible):
        name, value = ("devices", device) if worker.devices else ("data_parallel_size", worker.data_parallel_size)
        nearest = len(visible) - 1 if worker.devices else len(visible)
        rule = f"is {value}, but {VISIBLE} lists {len(visible)} devices; nearest valid value: {nearest}"
        raise ConfigError(f"{name} {rule}", violations=(Violation(name, rule),))
    return {VISIBLE: visible[device]} if visible else {}
