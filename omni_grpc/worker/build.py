"""From a checkpoint to a runner that is ready: device, precision, weights."""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable

import torch

from omni_grpc.config import EngineConfig
from omni_grpc.resolve.settings import Machine, place
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Ready
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.base import LoadedModel, Runner, RunnerContext
from omni_grpc.worker.device_memory import DeviceMemory, memory_of
from omni_grpc.worker.membership import Membership
from omni_grpc.worker.offload import offloading
from omni_grpc.worker.profiler import profiled
from omni_grpc.worker.recipe import with_recipe
from omni_grpc.worker.residency import Residency


def machine() -> Machine:
    """Whether there is a CUDA device, and the CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cuda=torch.cuda.is_available(), cores=cores)


def build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    prefix: str,
    tell: Callable[[Loading], None],
    *,
    memory: DeviceMemory | None = None,
    membership: Membership | None = None,
) -> tuple[Runner, Residency, Ready]:
    """Loads the runner of a checkpoint, and says where its weights are. Raises ConfigError for a missing device,
    CheckpointError by name. `memory` stands for that of the device, where it is not the device's own;
    `membership` is for a process that is one rank of several.
    """
    began = time.monotonic()
    config = with_recipe(config, checkpoint, tell)
    placement = place(config.model, machine(), replicas=config.processes)
    device, dtype = torch.device(placement.device), getattr(torch, placement.dtype)
    if placement.cpu_threads is not None:
        torch.set_num_threads(placement.cpu_threads)
    ranks = None if membership is None else membership.join(device)
    memory = memory or memory_of(device)
    made = offloading(config, checkpoint, placement, memory)
    config = made.config
    kind: type[Runner] = pkgutil.resolve_name(checkpoint.spec.runner)
    loaded: LoadedModel = kind.load(
        RunnerContext(
            config=config,
            checkpoint=checkpoint,
            device=device,
            dtype=dtype,
            prefix=prefix,
            tell=tell,
            staging=made.staging,
            residency=made.described,
            ranks=ranks,
            memory=memory,
        )
    )
    profiler = config.profiler
    residency = Residency(loaded, device, memory)
    ready = Ready(
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=placement.dtype,
        load_seconds=time.monotonic() - began,
        weight_bytes=loaded.weight_bytes,
        cost=loaded.cost,
        found=loaded.found,
        warnings=loaded.warnings,
        checkpoint=loaded.checkpoint,
        device_bytes=residency.device_bytes,
        memory=loaded.memory,
    )
    return loaded.runner if profiler is None else profiled(loaded, profiler, device), residency, ready
