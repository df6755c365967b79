"""From a checkpoint to a pipeline that can run: device, precision, weights."""

from __future__ import annotations

import importlib
import os
import time

import torch

from omni_grpc.config import EngineConfig
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.plan import Ready
from omni_grpc.resolve import Machine, place
from omni_grpc.spec import Checkpoint


def machine() -> Machine:
    """What this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cuda=torch.cuda.is_available(), cores=cores)


def build(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Pipeline, torch.device, Ready]:
    """Loads the pipeline of a checkpoint. Raises ConfigError for a missing device, CheckpointError by name."""
    began = time.monotonic()
    placement = place(config.model, machine())
    device, dtype = torch.device(placement.device), getattr(torch, placement.dtype)
    if placement.cpu_threads is not None:
        torch.set_num_threads(placement.cpu_threads)
    module, _, name = checkpoint.spec.pipeline.partition(":")
    pipeline: Pipeline = getattr(importlib.import_module(module), name).load(checkpoint, device, dtype)
    weight_bytes = sum(p.numel() * p.element_size() for p in pipeline.parameters())
    ready = Ready(
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=placement.dtype,
        load_seconds=time.monotonic() - began,
        weight_bytes=weight_bytes,
    )
    return pipeline, device, ready
