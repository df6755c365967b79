"""Helios' own scheduler, as `pipeline.schedule.Schedule` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np

from omni_grpc.pipeline.schedule import Device, Levels, SchedulerClass
from omni_grpc.types.errors import CheckpointError


def _helios(config: Mapping[str, Any], levels: Levels, device: Device) -> Any:
    """UniPC or Euler, as its config says. With stages it goes through a pyramid of sizes, which no schedule does."""
    scheduler = diffusers.HeliosScheduler.from_config(dict(config))
    if scheduler.config.stages != 1:
        raise CheckpointError(
            f"scheduler: HeliosScheduler with stages = {scheduler.config.stages} is not served yet",
            reason="SCHEDULER_NOT_SUPPORTED",
        )
    sigmas = None if levels.sigmas is None else np.asarray(levels.sigmas)
    scheduler.set_timesteps(levels.steps, device=device, sigmas=sigmas, mu=levels.mu)
    return scheduler


SCHEDULERS: Mapping[str, SchedulerClass] = {"HeliosScheduler": SchedulerClass(_helios)}
