"""LoRA adapters: what a request asks for, what a worker has loaded, and what became of both. Plain frozen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

MAX_LORAS = 8
"""The most adapters of one request."""


MAX_LORA_SCALE = 100.0
"""The largest factor of an adapter; its negative is the smallest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """One adapter of a request: its change of the weights times `scale`, in one component or ("") all that it fits."""

    lora_id: str
    scale: float = 1.0
    target: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that a worker has loaded.

    `applied` counts its keys that found a layer, by component; `skipped` names those that found none in any, each with
    the reason. `warnings`: what the operator should know of how it is used.
    """

    id: str
    file: str
    sha256: str
    format: str
    rank: int
    size_bytes: int
    applied: Mapping[str, int]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def keys_applied(self) -> int:
        return sum(self.applied.values())

    @property
    def targets(self) -> tuple[str, ...]:
        """The components that it changes."""
        return tuple(component for component, keys in self.applied.items() if keys)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLora:
    """An adapter as it was applied to one component of one request."""

    lora_id: str
    scale: float
    target: str
    keys_applied: int
    keys_skipped: int
