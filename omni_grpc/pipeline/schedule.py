"""Schedule: the noise levels of one output, and the update from one to the next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from omni_grpc.types.errors import CheckpointError

Device = torch.device | str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Which noise levels: as many as there are `steps`, or `sigmas`, one for each step without the final 0, where the
    pipeline chooses them itself. `mu` is the shift of schedulers that shift by size.
    """

    steps: int
    sigmas: Sequence[float] | None = None
    mu: float | None = None


def _euler(config: Mapping[str, Any], levels: Levels, device: Device) -> Any:
    # the stretch to shift_terminal divides by the distance of the last sigma from 1, which is 0 where the only sigma
    # is 1
    guard = {"shift_terminal": None} if levels.steps == 1 else {}
    config = dict(config)
    # what UniPC calls a shift
    flow_shift = config.pop("flow_shift", None)
    config.setdefault("shift", 1.0 if flow_shift is None else flow_shift)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config, **guard)
    if levels.sigmas is None:
        scheduler.set_timesteps(levels.steps, mu=levels.mu, device=device)
    else:
        scheduler.set_timesteps(sigmas=list(levels.sigmas), mu=levels.mu, device=device)
    return scheduler


def _heun(config: Mapping[str, Any], levels: Levels, device: Device) -> Any:
    """The levels of Euler's, since diffusers' Heun knows neither sigmas nor a shift by size. Every level but the first
    and the last is visited twice: at the end of a step, and at the start of the next.
    """
    euler = _euler(config, levels, device)
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler(num_train_timesteps=euler.config.num_train_timesteps)
    scheduler.set_timesteps(levels.steps, device=device)
    scheduler.sigmas = torch.cat([euler.sigmas[:1], euler.sigmas[1:-1].repeat_interleave(2), euler.sigmas[-1:]])
    scheduler.timesteps = torch.cat([euler.timesteps[:1], euler.timesteps[1:].repeat_interleave(2)])
    return scheduler


def _unipc(config: Mapping[str, Any], levels: Levels, device: Device) -> Any:
    config = dict(config)
    shift = config.pop("shift", None)
    if shift is not None:
        config.setdefault("flow_shift", shift)
    scheduler = diffusers.UniPCMultistepScheduler.from_config(config)
    if levels.sigmas is None:
        scheduler.set_timesteps(levels.steps, device=device, mu=levels.mu)
    else:
        scheduler.set_timesteps(levels.steps, device=device, sigmas=np.array(levels.sigmas), mu=levels.mu)
    return scheduler


def shifted(config: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """The config of a scheduler with a constant time shift in place of its whole rule, by either name of a shift."""
    return {**config, "shift": shift, "flow_shift": shift, "use_dynamic_shifting": False, "shift_terminal": None}


def _euler_shift(config: Mapping[str, Any], levels: Levels) -> float | None:
    shift = config.get("shift", config.get("flow_shift", 1.0))
    return _shift_by_size(config, levels) if config.get("use_dynamic_shifting") else float(shift)


def _unipc_shift(config: Mapping[str, Any], levels: Levels) -> float | None:
    """None unless its levels are those of flow matching."""
    if not config.get("use_flow_sigmas"):
        return None
    shift = config.get("flow_shift", config.get("shift", 1.0))
    return _shift_by_size(config, levels) if config.get("use_dynamic_shifting") else float(shift)


def _shift_by_size(config: Mapping[str, Any], levels: Levels) -> float | None:
    if levels.mu is None:
        return None
    return levels.mu if config.get("time_shift_type") == "linear" else math.exp(levels.mu)


def _no_shift(config: Mapping[str, Any], levels: Levels) -> float | None:
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerClass:
    """How a scheduler of one class is made, and how many predictions each of its steps takes but the last, which always
    takes one. `euler`: unless it adds noise, a step adds the prediction times the distance of two levels. `shift` tells
    the time shift of the levels; None where there is none.
    """

    make: Callable[[Mapping[str, Any], Levels, Device], Any]
    order: int = 1
    draws_noise: bool = False
    euler: bool = False
    shift: Callable[[Mapping[str, Any], Levels], float | None] = _no_shift


KINDS: Mapping[str, SchedulerClass] = {
    "FlowMatchEulerDiscreteScheduler": SchedulerClass(_euler, draws_noise=True, euler=True, shift=_euler_shift),
    "FlowMatchHeunDiscreteScheduler": SchedulerClass(_heun, order=2, draws_noise=True, shift=_euler_shift),
    "UniPCMultistepScheduler": SchedulerClass(_unipc, shift=_unipc_shift),
}
"""The schedulers that any model may have. A family with one of its own passes it to Schedule."""


class Schedule:
    """One diffusers scheduler of one output, made from the checkpoint's scheduler config.

    A step takes one prediction or, under samplers of higher order, several: evaluations are counted through all steps.
    `sigmas` has an entry per step and the final one; `timesteps` has an entry per evaluation, in the scheduler's own
    units; `shift` is the time shift, None where there is none. All are floats, to be reported and tabulated; the update
    itself reads the scheduler's tensors on `device`.

    `name` is the scheduler to take in place of the one that the config names; `own` are the scheduler classes of the
    model's family, besides those of any. Raises CheckpointError for a scheduler class that is not served.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        levels: Levels,
        *,
        device: Device,
        name: str = "",
        own: Mapping[str, SchedulerClass] = MappingProxyType({}),
    ) -> None:
        self.name, known = name or str(config.get("_class_name")), {**KINDS, **own}
        if self.name not in known:
            raise CheckpointError(
                f"scheduler: {self.name!r} is not served yet; served: {', '.join(known)}",
                reason="SCHEDULER_NOT_SUPPORTED",
            )
        kind = known[self.name]
        self._scheduler = kind.make(config, levels, device)
        self._scheduler.set_begin_index(0)
        self.shift = kind.shift(config, levels)
        self._draws_noise = kind.draws_noise
        self._order = kind.order
        self.timesteps: tuple[float, ...] = tuple(self._scheduler.timesteps.tolist())
        sigmas: list[float] = self._scheduler.sigmas.tolist()
        self.sigmas: tuple[float, ...] = (sigmas[0], *sigmas[1 :: kind.order])
        plain = kind.euler and not self._scheduler.config.get("stochastic_sampling")
        self._widths: list[float] = self._scheduler.sigmas.diff().tolist() if plain else []

    @property
    def evaluations(self) -> int:
        """Predictions of all steps together."""
        return len(self.timesteps)

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def step_of(self, evaluation: int) -> int:
        """The step that an evaluation belongs to; the one after the last belongs to the step after the last."""
        return -(-evaluation // self._order) if evaluation == self.evaluations else evaluation // self._order

    def step(
        self, latents: Tensor, prediction: Tensor, evaluation: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """latents and prediction [T, C] -> the latents after an evaluation: those at the end of its step, or at the
        level of the step's next evaluation.

        Evaluations are taken in order; `generator` serves schedulers that add noise. Raises ValueError for another
        evaluation than the next one.
        """
        self._check_next(evaluation)
        noise = {"generator": generator} if self._draws_noise else {}
        timestep = self._scheduler.timesteps[evaluation]
        stepped: tuple[Tensor, ...] = self._scheduler.step(prediction, timestep, latents, return_dict=False, **noise)
        return stepped[0]

    def width(self, evaluation: int) -> float | None:
        """Where an evaluation is a step of Euler's method, latents + width * prediction: that width. Else None."""
        return self._widths[evaluation] if self._widths else None

    def skip(self, evaluation: int) -> None:
        """Counts an evaluation that has a width and whose step was taken elsewhere."""
        self._check_next(evaluation)
        if not self._widths:
            raise ValueError(f"{self.name} has to take evaluation {evaluation} itself")
        self._scheduler._step_index = evaluation + 1

    def _check_next(self, evaluation: int) -> None:
        following = self._scheduler.step_index or 0
        if following != evaluation:
            raise ValueError(f"evaluation {evaluation} was asked for, the next one is {following}")


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
