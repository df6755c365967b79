"""The workers of a server: one for each replica, on a device of its own or on one for each of its ranks, or where a Ray
cluster has room.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from omni_grpc.checkpoint.registry import on_hub
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import RAY
from omni_grpc.engine.executor import Executor, HubExecutor, ProcessExecutor
from omni_grpc.engine.rank_executor import RankExecutor
from omni_grpc.engine.rank_link import LaunchedExecutor, RankLink
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.spec import Checkpoint

VISIBLE = "CUDA_VISIBLE_DEVICES"


def executors(config: EngineConfig, checkpoint: Checkpoint, link: RankLink | None = None) -> list[Executor]:
    """One for each replica of `--data-parallel-size`; `link`: to the ranks that torchrun started, which are one. Raises
    ConfigError where CUDA_VISIBLE_DEVICES lists fewer devices than there are replicas, where the extra for Ray is not
    installed, and for a second model of the ranks of torchrun.
    """
    if link is not None:
        link.take(checkpoint.name)
        environment = environment_of(link.launch.local_rank, config)

        def make(found: Checkpoint) -> ProcessExecutor:
            return LaunchedExecutor(config, found, link, environment=environment)

        return [HubExecutor(config, checkpoint, make=make) if on_hub(config.model) else make(checkpoint)]
    if config.worker.distributed_executor_backend == RAY:
        # here, so that nobody else needs it
        from omni_grpc.engine.ray_executor import ray_executors

        return ray_executors(config, checkpoint)
    processes, world, devices = config.processes, config.parallel.sizes.world, config.worker.devices
    if devices:
        _check_devices(devices, processes, world)
    environments = [environment_of(number, config) for number in range(processes)]
    replicas = [environments[first : first + world] for first in range(0, processes, world)]
    return [_executor(config, checkpoint, replica) for replica in replicas]


def _executor(config: EngineConfig, checkpoint: Checkpoint, environments: Sequence[Mapping[str, str]]) -> Executor:
    """That of one replica, with the variables of each of its processes."""

    def make(found: Checkpoint) -> ProcessExecutor:
        if len(environments) == 1:
            return ProcessExecutor(config, found, environment=environments[0])
        return RankExecutor(config, found, environments)

    return HubExecutor(config, checkpoint, make=make) if on_hub(config.model) else make(checkpoint)


def _check_devices(devices: Sequence[str], processes: int, world: int) -> None:
    if len(devices) != processes or not all(device.isdecimal() for device in devices):
        each = "one for each replica" if world == 1 else f"{world} for each replica, one for each rank"
        rule = f"is {','.join(devices)}: expected the numbers of {processes} GPUs, {each}"
        raise ConfigError(f"devices {rule}", violations=(Violation("devices", rule),))


def environment_of(number: int, config: EngineConfig) -> Mapping[str, str]:
    """What a process sees of the machine. A single one sees all of it, unless it is given a device; on a CPU they share
    it.
    """
    worker = config.worker
    if config.model.device == "cpu" or (config.processes == 1 and not worker.devices):
        return {}
    device = int(worker.devices[number]) if worker.devices else number
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return {VISIBLE: str(device)}
    visible = [name.strip() for name in listed.split(",") if name.strip()]
    if visible and device >= len(visible):
        world = config.parallel.sizes.world
        name, value = ("devices", device) if worker.devices else ("data_parallel_size", worker.data_parallel_size)
        nearest = len(visible) - 1 if worker.devices else len(visible) // world
        of_each = f", of {world} ranks each" if world > 1 and not worker.devices else ""
        rule = f"is {value}{of_each}, but {VISIBLE} lists {len(visible)} devices"
        rule += f"; nearest valid value: {nearest}" if nearest or worker.devices else "; ask for fewer ranks"
        raise ConfigError(f"{name} {rule}", violations=(Violation(name, rule),))
    return {VISIBLE: visible[device]} if visible else {}
