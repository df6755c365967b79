"""Steps of several sides that are timed in turns, and diffusers with the best attention that is installed.

What is timed first has the cooler card, and clocks drift over minutes; so each repetition times every side once, and
another side is the first of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from diffusers import ModelMixin

from omni_grpc.adapter import backends
from omni_grpc.types.errors import ConfigError

Step = TypeVar("Step")
BEST_FIRST: Sequence[str] = ("FLASH_ATTN_3", "FLASH_ATTN_2", "CUDNN_ATTN", "TORCH_SDPA")
"""The names of `adapter.backends`, which knows those of diffusers' dispatcher: `_flash_3_hub`, `_flash_3`, `flash_hub`,
`flash`, `_native_cudnn` and `native`.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """diffusers' name of the backend, and why those before it cannot be had."""

    name: str
    refused: Sequence[str] = ()


def best_attention(module: ModelMixin, device: torch.device, dtype: torch.dtype) -> Chosen:
    """Sets the first backend of BEST_FIRST that is installed and runs on this device; ConfigError if none does."""
    refused: list[str] = []
    for name in BEST_FIRST:
        try:
            chosen = backends.choose([module], name, fallback=False, device=device, dtype=dtype)
        except ConfigError as error:
            if name == BEST_FIRST[-1]:
                raise
            refused.append(str(error))
        else:
            return Chosen(chosen.name, refused)
    raise AssertionError("the last one is returned or raised")


def take_turns(
    steps: Mapping[str, Step], repetitions: int, clock: Callable[[Step], float]
) -> Mapping[str, list[float]]:
    """`clock` of each step, `repetitions` times: repetition r begins with side r, r + sides..., and goes round."""
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in (*names[first:], *names[:first]):
            taken[name].append(clock(steps[name]))
    return taken
