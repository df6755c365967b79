"""Schedule: the noise levels of one output, and the update from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor

from omni_grpc.errors import CheckpointError

SERVED = ("FlowMatchEulerDiscreteScheduler",)
"""Schedulers that make one update per prediction and whose only state is the step. The others are not served yet."""


class Schedule:
    """One diffusers scheduler of one output, made from the checkpoint's scheduler config.

    `sigmas` has an entry per step and the final one; `timesteps` has an entry per step, in the scheduler's own units.
    Both are floats, to be reported and tabulated; the update itself reads the scheduler's tensors on `device`. Raises
    CheckpointError for a scheduler class that is not served.
    """

    def __init__(
        self, config: Mapping[str, Any], sigmas: Sequence[float], *, mu: float | None, device: torch.device | str
    ) -> None:
        name = config.get("_class_name")
        if name not in SERVED:
            raise CheckpointError(
                f"scheduler: {name!r} is not served yet; served: {', '.join(SERVED)}", reason="SCHEDULER_NOT_SUPPORTED"
            )
        # the stretch to shift_terminal divides by the distance of the last sigma from 1, which is 0 where the only
        # sigma is 1
        guard = {"shift_terminal": None} if len(sigmas) == 1 else {}
        self._scheduler = getattr(diffusers, name).from_config(dict(config), **guard)
        self._scheduler.set_timesteps(sigmas=list(sigmas), mu=mu, device=device)
        self._scheduler.set_begin_index(0)
        self.sigmas: tuple[float, ...] = tuple(self._scheduler.sigmas.tolist())
        self.timesteps: tuple[float, ...] = tuple(self._scheduler.timesteps.tolist())

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def step(self, latents: Tensor, prediction: Tensor, index: int, generator: torch.Generator | None = None) -> Tensor:
        """The latents after step `index`. Steps are taken in order; `generator` serves schedulers that add noise."""
        if (self._scheduler.step_index or 0) != index:
            raise ValueError(f"step {index} was asked for, but the next one is {self._scheduler.step_index or 0}")
        timestep = self._scheduler.timesteps[index]
        stepped: tuple[Tensor, ...] = self._scheduler.step(
            prediction, timestep, latents, generator=generator, return_dict=False
        )
        return stepped[0]


def dynamic_shift(config: Mapping[str, Any], tokens: int) -> float:
    """The mu of a scheduler with dynamic shifting: linear in the number of image tokens, through the config's two
    points.

    More tokens need more noise to be destroyed (https://arxiv.org/abs/2403.03206, section 5.3.2), so mu grows with
    them.
    """
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (most - base) / (high - low)
    return float(tokens * slope + (base - slope * low))
